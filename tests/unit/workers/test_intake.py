"""What is a ring is let in, and nothing else; no message is so odd that asking raises."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from farm.queue import TASKS
from farm.rollout import Stage
from workers.intake import fault_of

RING = {"task": TASKS[Stage.RUN], "id": "a uuid"}
LINK = {"task": TASKS[Stage.EVAL], "args": ["b.0.0", 1]}
EMBEDDED = {"callbacks": None, "errbacks": None, "chain": [LINK], "chord": None}

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["b.0.0", "chain", "task"])
)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def message(body: bytes, headers: Any = RING, kind: str | None = "application/json") -> Message:
    made = Message(  # type: ignore[no-untyped-call]
        body=body, content_type=kind, content_encoding="utf-8", headers=headers, accept={"application/json"}
    )
    return made


def test_a_ring_is_let_in() -> None:
    assert fault_of(message(json.dumps([["b.0.0", 1], {}, EMBEDDED]).encode())) == ""


@given(st.binary() | _json.map(lambda value: json.dumps(value).encode()), st.sampled_from([RING, {}]))
def test_what_is_anything_else_is_not(body: bytes, headers: dict[str, Any]) -> None:
    assert fault_of(message(body, headers))


@given(st.lists(_json, max_size=3), _json, _json)
def test_what_resembles_a_ring_has_the_arguments_of_one(arguments: list[Any], named: Any, embedded: Any) -> None:
    if not fault_of(message(json.dumps([arguments, named, embedded]).encode())):
        rollout_id, attempt = arguments
        assert isinstance(rollout_id, str)
        assert type(attempt) is int
        assert not named


@given(st.dictionaries(st.sampled_from(["task", "id", "eta", "lang"]), _json))
def test_headers_of_any_kind_are_looked_at(headers: dict[str, Any]) -> None:
    fault = fault_of(message(json.dumps([["b.0.0", 1], {}, EMBEDDED]).encode(), headers))
    assert fault or headers["task"] in TASKS.values()

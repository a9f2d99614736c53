"""Only stage messages are accepted; a check never raises, however malformed the message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from farm.records.rollout import Stage
from farm.scheduler.broker import TASKS
from workers.queue import message_filter

RING = {"task": TASKS[Stage.RUN], "id": "a uuid"}
LINK = {"task": TASKS[Stage.EVAL], "args": ["b.0.0", 1], "kwargs": {}, "options": {"queue": "eval.here", "expires": 9}}
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


def fault_of(made: Message) -> str:
    return message_filter.fault_of(made, "here", "run")


def test_stage_message_is_accepted() -> None:
    assert fault_of(message(json.dumps([["b.0.0", 1], {}, EMBEDDED]).encode())) == ""


@given(st.binary() | _json.map(lambda value: json.dumps(value).encode()), st.sampled_from([RING, {}]))
def test_any_other_message_is_refused(body: bytes, headers: dict[str, Any]) -> None:
    assert fault_of(message(body, headers))


@given(st.lists(_json, max_size=3), _json, _json)
def test_accepted_message_has_the_arguments_of_a_stage(arguments: list[Any], named: Any, embedded: Any) -> None:
    if not fault_of(message(json.dumps([arguments, named, embedded]).encode())):
        rollout_id, attempt = arguments
        assert isinstance(rollout_id, str)
        assert type(attempt) is int
        assert not named


@given(st.dictionaries(st.sampled_from(["task", "id", "eta", "lang"]), _json))
def test_headers_of_any_type_are_checked(headers: dict[str, Any]) -> None:
    fault = fault_of(message(json.dumps([["b.0.0", 1], {}, EMBEDDED]).encode(), headers))
    assert fault or headers["task"] in TASKS.values()


@pytest.mark.parametrize(
    "headers",
    [
        {"task": TASKS[Stage.INIT]},
        {"eta": "2030-01-01T00:00:00"},
        {"argsrepr": "x" * 20_000},
        {"shadow": "another name"},
        {"stamps": {"a": 1}, "stamped_headers": ["a"]},
        {"timelimit": [1, 1]},
        {"origin": ["a", "list"]},
        {"retries": 1.5},
    ],
)
def test_stage_message_has_no_headers_that_order_anything(headers: dict[str, Any]) -> None:
    body = json.dumps([["b.0.0", 1], {}, EMBEDDED]).encode()
    assert not fault_of(message(body, RING | {"retries": 0, "timelimit": [None, None], "stamps": {}}))
    assert fault_of(message(body, RING | headers))


@pytest.mark.parametrize(
    "chain",
    [
        [],
        [LINK, LINK],
        [LINK | {"args": ["b.0.1", 1]}],
        [LINK | {"args": ["b.0.0", 2]}],
        [LINK | {"task": TASKS[Stage.INIT]}],
        [LINK | {"kwargs": {"a": 1}}],
        [LINK | {"options": {"queue": "eval.there"}}],
        [LINK | {"options": {"queue": "eval.here", "countdown": 3600}}],
        [LINK | {"options": {"queue": "eval.here", "serializer": "pickle"}}],
        [LINK | {"options": {"queue": "eval.here", "link": [LINK]}}],
        [LINK | {"options": {}}],
        [None],
        {"a": 1},
    ],
)
def test_chain_may_contain_only_the_rollouts_own_next_stages(chain: Any) -> None:
    assert fault_of(message(json.dumps([["b.0.0", 1], {}, EMBEDDED | {"chain": chain}]).encode()))

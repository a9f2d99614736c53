from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from farm.trajectory import VersionSpan, token_ids
from workers.policy.engines.intake import Intake, without_echo
from workers.policy.engines.wire import prompt_json

PROMPT = token_ids([7, 8, 9])


def taken(**changes: Any) -> Intake:
    intake = Intake(PROMPT)
    intake.ids, intake.logprobs, intake.logprob_ids = [4, 5], [-0.5, 0.0], [4, 5]
    intake.finish_reason, intake.n_counted = "stop", 2
    intake.versions = (VersionSpan("1", 0, 1), VersionSpan("2", 1, 2))
    for name, value in changes.items():
        setattr(intake, name, value)
    return intake


def test_what_adds_up_passes() -> None:
    found = taken().generation()
    assert found.response_ids.tolist() == [4, 5]
    assert found.response_logprobs is not None
    assert found.response_logprobs.tolist() == [-0.5, 0.0]
    assert found.response_ids.dtype == np.int32
    assert found.response_logprobs.dtype == np.float32


def test_nothing_sampled_before_an_abort_adds_up() -> None:
    found = taken(ids=[], logprobs=[], logprob_ids=[], n_counted=0, versions=(), finish_reason="abort").generation()
    assert len(found.response_ids) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": [-0.5]}, "2 token ids, 1 log-probabilities, 2 tokens counted"),
        ({"ids": [4, 5, 6], "logprob_ids": []}, "3 token ids, 2 log"),
        ({"n_counted": 3}, "3 tokens counted"),
        ({"n_counted": None}, "does not count"),
        ({"finish_reason": None}, "does not say why"),
        ({"logprobs": [-0.5, -9999.0]}, "unknown or above 0"),
        ({"logprobs": [-0.5, None]}, "unknown or above 0"),
        ({"logprobs": [-0.5, float("-inf")]}, "unknown or above 0"),
        ({"logprobs": [-0.5, 0.1]}, "unknown or above 0"),
        ({"logprob_ids": [4, 6]}, "other tokens"),
        ({"ids": [4, 5.5]}, "natural numbers"),
        ({"ids": [4, -5]}, "natural numbers"),
        ({"ids": [4, 2**31]}, "natural numbers"),
        ({"versions": (VersionSpan("1", 0, 1),)}, "for 1 of 2 tokens"),
        ({"versions": (VersionSpan("1", 0, 3),)}, "for 3 of 2 tokens"),
        ({"versions": (VersionSpan("1", 1, 2),)}, "gap at token 0"),
        ({"versions": (VersionSpan("1", 0, 2), VersionSpan("2", 1, 2))}, "gap at token 2"),
    ],
)
def test_what_does_not_add_up_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        taken(**changes).generation()


def test_a_log_probability_above_0_by_rounding_is_0() -> None:
    found = taken(logprobs=[-0.5, 1e-7]).generation().response_logprobs
    assert found is not None
    assert found.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("written", [orjson.dumps, lambda value: repr(value).replace("'", '"').encode()])
def test_the_prompt_is_compared_as_it_was_written(written: Any) -> None:
    for echoed, equal in ([7, 8, 9], True), ([7, 8, 99], False), ([7, 8], False), ([7, 8, 9, 1], False):
        content = written({"a": "ü", "prompt_token_ids": echoed, "b": [1]})
        answer = orjson.loads(without_echo(content, prompt_json(PROMPT)))
        assert answer["b"] == [1]
        intake = taken()
        intake.saw(answer["prompt_token_ids"])
        seen = intake.generation().prompt_ids
        assert seen is not None
        assert (seen.tolist() == [7, 8, 9]) is equal
        assert seen.tolist() == echoed


def test_an_engine_that_does_not_say_what_it_saw() -> None:
    for content in b'{"x":1}', b'{"prompt_token_ids":null}':
        intake = taken()
        intake.saw(orjson.loads(without_echo(content, prompt_json(PROMPT))).get("prompt_token_ids"))
        assert intake.generation().prompt_ids is None


def test_a_prompt_is_written_whatever_its_type() -> None:
    ids = np.arange(6, dtype=np.int64)[::2]
    assert prompt_json(ids) == b"[0,2,4]"  # type: ignore[arg-type]

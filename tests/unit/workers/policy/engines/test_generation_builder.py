from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from farm.records.trajectory import VersionSpan, token_ids
from workers.policy.engines.generation_builder import GenerationBuilder, without_echo
from workers.policy.engines.wire import prompt_json

PROMPT = token_ids([7, 8, 9])


def taken(max_tokens: int | None = 10, **changes: Any) -> GenerationBuilder:
    values: dict[str, Any] = {
        "ids": [4, 5],
        "logprobs": [-0.5, 0.0],
        "logprob_ids": [4, 5],
        "finish_reason": "stop",
        "stop_reason": None,
        "n_counted": 2,
        "n_cached_tokens": None,
        "prompt": None,
        "versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}],
        **changes,
    }
    intake = GenerationBuilder(PROMPT, max_tokens, n_vocabulary=1000)
    intake.saw(values["prompt"])
    intake.add(values["ids"], values["logprobs"], values["logprob_ids"])
    intake.end(values["finish_reason"], values["stop_reason"])
    intake.n_counted, intake.n_cached_tokens = values["n_counted"], values["n_cached_tokens"]
    intake.spans(values["versions"])
    return intake


def spans(*found: tuple[Any, Any, Any]) -> dict[str, Any]:
    return {"versions": [{"version": version, "start": start, "end": end} for version, start, end in found]}


def test_consistent_answer_passes() -> None:
    generation = taken(n_cached_tokens=3, stop_reason=5).generation()
    assert generation.response_ids.tolist() == [4, 5]
    assert generation.response_logprobs is not None
    assert generation.response_logprobs.tolist() == [-0.5, 0.0]
    assert generation.response_ids.dtype == np.int32
    assert generation.response_logprobs.dtype == np.float32
    assert generation.versions == (VersionSpan("1", 0, 1), VersionSpan("2", 1, 2))
    assert (generation.n_cached_tokens, generation.stop_reason) == (3, 5)


def test_no_tokens_before_an_abort_are_consistent() -> None:
    generation = taken(
        ids=[], logprobs=[], logprob_ids=[], n_counted=0, versions=(), finish_reason="abort"
    ).generation()
    assert len(generation.response_ids) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": [-0.5]}, "2 token ids, 1 log-probabilities, 2 tokens counted"),
        ({"ids": [4, 5, 6], "logprob_ids": []}, "3 token ids, 2 log"),
        ({"n_counted": 3}, "3 tokens counted"),
        ({"n_counted": None}, "no count of"),
        ({"n_counted": 2.0}, "not a number of tokens"),
        ({"n_counted": True}, "not a number of tokens"),
        ({"finish_reason": None}, "no finish reason"),
        ({"finish_reason": ""}, "no finish reason"),
        ({"finish_reason": "banana"}, "'banana' is not one of"),
        ({"finish_reason": ["stop"]}, r"\['stop'\] is not one of"),
        ({"finish_reason": {"type": "stop"}}, "is not one of"),
        ({"finish_reason": True}, "True is not one of"),
        ({"finish_reason": 1}, "1 is not one of"),
        ({"finish_reason": "error"}, "broke off the generation"),
        ({"finish_reason": "x" * 10_000}, "is not one of"),
        ({"stop_reason": [1]}, "neither a string nor a token"),
        ({"stop_reason": 2**70}, "neither a string nor a token"),
        ({"stop_reason": True}, "neither a string nor a token"),
        ({"stop_reason": 1.5}, "neither a string nor a token"),
        ({"logprobs": [-0.5, -9999.0]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, None]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, float("-inf")]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, float("nan")]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, 0.1]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, -1e300]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, -(10**400)]}, "unknown(,| or) above 0"),
        ({"logprobs": [-0.5, False]}, "not numbers"),
        ({"logprobs": [-0.5, "-0.5"]}, "not numbers"),
        ({"logprobs": [-0.5, [-0.5]]}, "not numbers"),
        ({"logprobs": "-0.5"}, "not numbers"),
        ({"logprobs": {"0": -0.5, "1": -0.5}}, "not numbers"),
        ({"logprobs": -0.5}, "not numbers"),
        ({"logprob_ids": [4, 6]}, "other tokens"),
        ({"logprob_ids": [4, "5"]}, "other tokens"),
        ({"ids": [4, 5.5]}, "natural numbers"),
        ({"ids": [4, 5.0]}, "natural numbers"),
        ({"ids": [4, True]}, "natural numbers"),
        ({"ids": [4, "5"]}, "natural numbers"),
        ({"ids": [4, None]}, "natural numbers"),
        ({"ids": [4, [5]]}, "natural numbers"),
        ({"ids": "45"}, "natural numbers"),
        ({"ids": {"4": 5}}, "natural numbers"),
        ({"ids": 45}, "natural numbers"),
        ({"ids": True}, "natural numbers"),
        ({"ids": [4, -5]}, "-5 is not among the 1000"),
        ({"ids": [4, 1000]}, "1000 is not among the 1000"),
        ({"ids": [4, 2**31]}, "not among the 1000"),
        ({"ids": [4, 2**70]}, "not among the 1000"),
        ({"max_tokens": 1}, "2 token ids, but only 1 were requested"),
        ({"ids": [], "logprobs": [], "logprob_ids": [], "n_counted": 0, "versions": ()}, "no token ids, but"),
        ({"ids": None, "logprobs": None, "logprob_ids": None, "n_counted": 0, "versions": None}, "no token ids"),
        ({"prompt": [7, 8, 1000]}, "not among the 1000"),
        ({"prompt": [7, 8, 9.5]}, "natural numbers"),
        ({"prompt": True}, "natural numbers"),
        ({"prompt": "789"}, "natural numbers"),
        ({"n_cached_tokens": -1}, "not a number of tokens"),
        ({"n_cached_tokens": 2**70}, "not a number of tokens"),
        ({"n_cached_tokens": "3"}, "not a number of tokens"),
        ({"n_cached_tokens": True}, "not a number of tokens"),
        ({"n_cached_tokens": 6}, "6 tokens cached of 3"),
        (spans(("1", 0, 1)), "for 1 of 2 tokens"),
        (spans(("1", 0, 3)), "for 3 of 2 tokens"),
        (spans(("1", 1, 2)), "gap at token 0"),
        (spans(("1", 0, 2), ("2", 1, 2)), "gap at token 2"),
        (spans(("1", 0, 2.0)), "not a number of tokens"),
        (spans(("1", False, 2)), "not a number of tokens"),
        (spans(("-7", 0, 2)), "version '-7'"),
        (spans((-7, 0, 2)), "version"),
        (spans((True, 0, 2)), "version True"),
        (spans((7.5, 0, 2)), "version 7.5"),
        (spans(("9" * 100_000, 0, 2)), "version '9999"),
        (spans(("7\n", 0, 2)), "version"),
        (spans((["7"], 0, 2)), "version"),
    ],
)
def test_inconsistent_answer_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        taken(**changes).generation()


def test_id_above_any_vocabulary_is_refused_without_a_tokenizer() -> None:
    intake = GenerationBuilder(PROMPT)
    with pytest.raises(ValueError, match="not among the"):
        intake.add([2**22], [-0.5])


def test_log_probability_above_0_by_rounding_is_0() -> None:
    result = taken(logprobs=[-0.5, 1e-7]).generation().response_logprobs
    assert result is not None
    assert result.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("written", [orjson.dumps, lambda value: repr(value).replace("'", '"').encode()])
def test_echoed_prompt_is_compared_as_it_was_written(written: Any) -> None:
    for echoed, equal in ([7, 8, 9], True), ([7, 8, 99], False), ([7, 8], False), ([7, 8, 9, 1], False):
        content = written({"a": "ü", "prompt_token_ids": echoed, "b": [1]})
        rest = without_echo(content, prompt_json(PROMPT))
        assert equal or rest is None
        answer = orjson.loads(content if rest is None else rest)
        assert answer["b"] == [1]
        intake = taken()
        intake.saw(answer["prompt_token_ids"], as_sent=rest is not None)
        seen = intake.generation().prompt_ids
        assert seen is not None
        assert seen.tolist() == echoed


def test_answer_without_prompt_ids_has_no_prompt_ids() -> None:
    for content in b'{"x":1}', b'{"prompt_token_ids":null}':
        assert without_echo(content, prompt_json(PROMPT)) is None
        intake = taken()
        intake.saw(orjson.loads(content).get("prompt_token_ids"))
        assert intake.generation().prompt_ids is None


def test_prompt_of_any_integer_type_is_written() -> None:
    ids = np.arange(6, dtype=np.int64)[::2]
    assert prompt_json(ids) == b"[0,2,4]"  # type: ignore[arg-type]

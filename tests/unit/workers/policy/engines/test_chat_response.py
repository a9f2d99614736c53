from __future__ import annotations

from typing import Any

import pytest

from farm.records.trajectory import VersionSpan
from workers.policy.engines.chat_response import completion


def answer(**changes: Any) -> dict[str, Any]:
    """A vLLM answer of three prompt and two response tokens; changes name places in it."""
    values: dict[str, Any] = {
        "prompt": [1, 2, 3],
        "response": [4, 5],
        "logprobs": [-0.5, 0.0],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        **changes,
    }
    return {
        "prompt_token_ids": values["prompt"],
        "usage": values["usage"],
        "choices": [
            {
                "message": {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None},
                "finish_reason": "stop",
                "token_ids": values["response"],
                "logprobs": values["logprobs"] and {"content": [{"logprob": value} for value in values["logprobs"]]},
                "weight_versions": values.get("versions"),
            }
        ],
    }


def test_an_exact_answer() -> None:
    taken = completion(
        answer(versions=[{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]), "e"
    )
    assert taken.prompt_ids is not None
    assert taken.response_ids is not None
    assert taken.response_logprobs is not None
    assert taken.prompt_ids.tolist() == [1, 2, 3]
    assert taken.response_ids.tolist() == [4, 5]
    assert taken.response_logprobs.tolist() == [-0.5, 0.0]
    assert taken.policy_version == "7"
    assert taken.versions == (VersionSpan("7", 0, 1), VersionSpan("8", 1, 2))
    assert taken.response == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize("changes", [{"prompt": None}, {"response": None}, {"logprobs": None}])
def test_what_is_missing_makes_it_text_only(changes: dict[str, Any]) -> None:
    taken = completion(answer(**changes), "e")
    assert (taken.prompt_ids, taken.response_ids, taken.response_logprobs) == (None, None, None)
    assert (taken.n_prompt_tokens, taken.n_response_tokens) == (3, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, 0.1]},
        {"logprobs": [-0.5, -9999.0]},
        {"logprobs": [-0.5, float("nan")]},
        {"response": [4, 5, 6]},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 3}},
        {"usage": {"prompt_tokens": 2, "completion_tokens": 2}},
        {"versions": [{"version": "7", "start": 1, "end": 2}]},
    ],
)
def test_what_does_not_add_up_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tokens? counted|unknown|gap"):
        completion(answer(**changes), "e")


def test_sglang_names() -> None:
    sent = answer()
    choice = sent["choices"][0]
    choice["prompt_token_ids"] = sent.pop("prompt_token_ids")
    choice["response_token_ids"] = choice.pop("token_ids")
    assert completion(sent, "e").response_ids is not None
    sent["metadata"] = {"weight_version": "9"}
    taken = completion(sent, "e")
    assert taken.policy_version == "9"
    assert taken.versions == (VersionSpan("9", 0, 2),)


def test_reasoning_has_one_name() -> None:
    for name in "reasoning", "reasoning_content":
        sent = answer()
        sent["choices"][0]["message"][name] = "because"
        assert completion(sent, "e").response == {"role": "assistant", "content": "hi", "reasoning_content": "because"}


def test_what_was_cached_and_what_stopped_it() -> None:
    sent = answer(
        usage={"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}},
    )
    sent["choices"][0]["stop_reason"] = "END"
    taken = completion(sent, "e")
    assert (taken.n_cached_tokens, taken.stop_reason) == (2, "END")

from __future__ import annotations

from typing import Any

import pytest

from workers.policy.answers import completion


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
    assert taken.message == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": None},
        {"response": None},
        {"logprobs": None},
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, 0.1]},
        {"logprobs": [-0.5, -9999.0]},
        {"logprobs": [-0.5, float("nan")]},
        {"response": [4, 5, 6]},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 3}},
        {"usage": {"prompt_tokens": 2, "completion_tokens": 2}},
    ],
)
def test_what_does_not_add_up_is_not_token_exact(changes: dict[str, Any]) -> None:
    taken = completion(answer(**changes), "e")
    assert (taken.prompt_ids, taken.response_ids, taken.response_logprobs) == (None, None, None)
    assert taken.n_prompt_tokens > 0


def test_sglang_names() -> None:
    sent = answer()
    choice = sent["choices"][0]
    choice["prompt_token_ids"] = sent.pop("prompt_token_ids")
    choice["response_token_ids"] = choice.pop("token_ids")
    assert completion(sent, "e").response_ids is not None

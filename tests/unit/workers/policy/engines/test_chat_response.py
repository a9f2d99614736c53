from __future__ import annotations

from typing import Any

import pytest

from farm.records.trajectory import VersionSpan
from workers.policy.engines.chat_route import completion


def answer(**changes: Any) -> dict[str, Any]:
    """Return a vLLM answer of three prompt and two response tokens; changes name places in it."""
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


def test_answer_with_ids_is_token_exact() -> None:
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
def test_answer_without_ids_is_text_only(changes: dict[str, Any]) -> None:
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
def test_inconsistent_answer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tokens? counted|unknown|gap"):
        completion(answer(**changes), "e")


def test_field_names_of_sglang_are_read() -> None:
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


def test_cached_tokens_and_stop_reason_are_read() -> None:
    sent = answer(
        usage={"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}},
    )
    sent["choices"][0]["stop_reason"] = "END"
    taken = completion(sent, "e")
    assert (taken.n_cached_tokens, taken.stop_reason) == (2, "END")


def of_message(**message: Any) -> Any:
    sent = answer()
    sent["choices"][0]["message"] = {"role": "assistant", **message}
    return completion(sent, "e").response


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"command": "ls"}', '{"command": "ls"}'),
        ({"command": "ls", "é": [1, None]}, '{"command": "ls", "é": [1, null]}'),
        ({}, "{}"),
        (None, ""),
        ([1], "[1]"),
        (5, "5"),
    ],
)
def test_arguments_may_be_an_object(arguments: Any, text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    response = of_message(content=None, tool_calls=[call])
    assert response["tool_calls"][0]["function"] == {"name": "bash", "arguments": text}
    assert response["content"] == ""


@pytest.mark.parametrize(
    ("content", "text", "thought"),
    [
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab", None),
        ([], "", None),
        (["a", "b"], "ab", None),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, {"type": "text", "text": "a"}], "a", "t"),
        ([{"type": "thinking", "thinking": "t"}], "", "t"),
    ],
)
def test_content_may_be_text_parts(content: Any, text: str, thought: str | None) -> None:
    response = of_message(content=content)
    assert (response["content"], response.get("reasoning_content")) == (text, thought)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": 5}])
def test_part_that_is_not_text_is_refused(part: Any) -> None:
    with pytest.raises(ValueError, match=r"image_url|text is a int"):
        of_message(content=[part])


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "stop"), (9, "stop"), (2, "length")])
@pytest.mark.parametrize("ids", [[4, 5], None])
def test_finish_reason_may_be_null(max_tokens: int | None, reason: str, ids: Any) -> None:
    sent = answer(response=ids)
    sent["choices"][0]["finish_reason"] = None
    taken = completion(sent, "e", max_tokens)
    assert (taken.finish_reason, taken.response_ids is None) == (reason, ids is None)


def test_unknown_finish_reason_is_refused() -> None:
    sent = answer()
    sent["choices"][0]["finish_reason"] = "tired"
    with pytest.raises(ValueError, match="is not one of"):
        completion(sent, "e")

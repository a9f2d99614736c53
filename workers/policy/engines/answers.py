"""A chat answer made into a Completion, token-exact where it holds ids and log-probabilities that add up.

Ids are never rebuilt from text. Where any are missing the call is text only; where they disagree the answer is refused,
as on the token wires. Fields as in vLLM's `return_token_ids` (`prompt_token_ids` on top, `choices[].token_ids`); SGLang
puts both in the choice, the second as `response_token_ids`.
"""

from __future__ import annotations

from typing import Any

from farm.trajectory import Message, VersionSpan, token_ids
from workers.interfaces import Completion
from workers.policy.engines.intake import Intake
from workers.policy.generation import Generation


def completion(answer: dict[str, Any], engine: str) -> Completion:
    """Raises KeyError, IndexError, TypeError or ValueError if the answer is no chat completion, or does not add up."""
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    exact = _exact(answer, choice, usage)
    return Completion(
        message=_message(choice["message"]),
        finish_reason=choice.get("finish_reason") or "",
        engine=engine,
        n_prompt_tokens=int(usage.get("prompt_tokens") or _length(exact and exact.prompt_ids)),
        n_response_tokens=int(usage.get("completion_tokens") or _length(exact and exact.response_ids)),
        policy_version=_version(answer, choice),
        prompt_ids=exact.prompt_ids if exact else None,
        response_ids=exact.response_ids if exact else None,
        response_logprobs=exact.response_logprobs if exact else None,
        versions=exact.versions if exact else (),
        stop_reason=choice.get("stop_reason", choice.get("matched_stop")),
        n_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _length(ids: Any) -> int:
    return 0 if ids is None else len(ids)


def _message(sent: dict[str, Any]) -> Message:
    """The message as it goes back into the history: what is unset is left out, every tool call has an id."""
    message: Message = {"role": "assistant", "content": sent.get("content") or ""}
    # vLLM calls it `reasoning`, SGLang and the chat templates `reasoning_content`.
    reasoning = sent.get("reasoning_content") or sent.get("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = sent.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return message


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id") or f"call_{index}",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def _exact(answer: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any]) -> Generation | None:
    """None if ids or log-probabilities are missing."""
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids") or choice.get("response_token_ids")
    entries = (choice.get("logprobs") or {}).get("content")
    if not prompt or not response or not entries:
        return None
    if usage.get("prompt_tokens", len(prompt)) != len(prompt):
        raise ValueError(f"{len(prompt)} prompt ids, {usage['prompt_tokens']} tokens counted")
    intake = Intake(token_ids(()))
    intake.saw(prompt)
    intake.ids = response
    intake.logprobs = [entry["logprob"] for entry in entries]
    intake.n_counted = usage.get("completion_tokens", len(response))
    intake.finish_reason = choice.get("finish_reason") or ""
    intake.spans(choice.get("weight_versions") or answer.get("weight_versions"))
    whole = (answer.get("metadata") or {}).get("weight_version")
    if whole is not None and not intake.versions:
        intake.versions = (VersionSpan(str(whole), 0, len(response)),)
    return intake.generation()


def _version(answer: dict[str, Any], choice: dict[str, Any]) -> str:
    """The weights that sampled it; the oldest where they changed under way, so that staleness is never understated."""
    spans = choice.get("weight_versions") or answer.get("weight_versions") or []
    if spans:
        return str(spans[0]["version"])
    return str((answer.get("metadata") or {}).get("weight_version") or "")

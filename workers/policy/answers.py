"""A chat answer made into a Completion; token ids are taken only where the answer proves them right.

Ids are never rebuilt from text: where lengths disagree or a log-probability is no number, the call is not token exact.
Fields as in vLLM's `return_token_ids` (`prompt_token_ids` on top, `choices[].token_ids`); SGLang puts both in the
choice, the second as `response_token_ids`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farm.trajectory import LogProbs, Message, TokenIds, token_ids
from workers.interfaces import Completion

_UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes for a log-probability it does not know."""


def completion(answer: dict[str, Any], engine: str) -> Completion:
    """Raises KeyError, IndexError or TypeError if the answer is no chat completion."""
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    exact = _exact(answer, choice, usage)
    prompt, response, logprobs = exact if exact is not None else (None, None, None)
    return Completion(
        message=_message(choice["message"]),
        finish_reason=choice.get("finish_reason") or "",
        engine=engine,
        n_prompt_tokens=int(usage.get("prompt_tokens") or (0 if prompt is None else len(prompt))),
        n_response_tokens=int(usage.get("completion_tokens") or (0 if response is None else len(response))),
        policy_version=_version(answer, choice),
        prompt_ids=prompt,
        response_ids=response,
        response_logprobs=logprobs,
    )


def _message(sent: dict[str, Any]) -> Message:
    """The message as it goes back into the history: what is unset is left out, every tool call has an id."""
    message: Message = {"role": "assistant", "content": sent.get("content") or ""}
    message |= {key: sent[key] for key in ("reasoning", "reasoning_content") if sent.get(key)}
    calls = sent.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{index}",
                "type": "function",
                "function": {
                    "name": call["function"].get("name") or "",
                    "arguments": call["function"].get("arguments") or "",
                },
            }
            for index, call in enumerate(calls)
        ]
    return message


def _exact(
    answer: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any]
) -> tuple[TokenIds, TokenIds, LogProbs] | None:
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids") or choice.get("response_token_ids")
    entries = (choice.get("logprobs") or {}).get("content")
    if not prompt or not response or not entries:
        return None
    lengths = {len(response), len(entries), usage.get("completion_tokens", len(response))}
    if len(lengths) != 1 or usage.get("prompt_tokens", len(prompt)) != len(prompt):
        return None
    logprobs = np.asarray([entry["logprob"] for entry in entries], np.float32)
    if not np.all((logprobs <= 0) & (logprobs > _UNKNOWN_LOGPROB)):
        return None
    return token_ids(prompt), token_ids(response), logprobs


def _version(answer: dict[str, Any], choice: dict[str, Any]) -> str:
    """The weights that sampled it; the oldest where they changed under way, so that staleness is never understated."""
    spans = choice.get("weight_versions") or answer.get("weight_versions") or []
    if spans:
        return str(spans[0]["version"])
    return str((answer.get("metadata") or {}).get("weight_version") or "")

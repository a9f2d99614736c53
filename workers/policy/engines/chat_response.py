"""Conversion of a chat answer into a Completion, token-exact if it has consistent ids and log-probabilities.

Ids are never rebuilt from text. If any are missing, the call is text only; if they disagree, the answer is refused by
the checks of `GenerationBuilder`, as on the token wires. The fields are those of vLLM's `return_token_ids`
(`prompt_token_ids` at the top, `choices[].token_ids`); SGLang puts both in the choice, the second as
`response_token_ids`.

Deviations of servers without a different meaning are accepted: arguments as JSON values, content as parts of text, a
null finish reason.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from farm.records.trajectory import Message, SampledTokens, TokenIds, VersionSpan, field_values, token_ids
from workers.plugins.interfaces import Completion
from workers.policy.engines.generation_builder import GenerationBuilder, count, finish_reason, stop_reason, version
from workers.policy.generation import Generation


def completion(answer: Any, engine: str, max_tokens: int | None = None) -> Completion:
    """Convert a chat answer.

    Raises KeyError, IndexError, TypeError, ValueError or AttributeError if it is inconsistent or not a chat completion.
    """
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    exact = _exact(answer, choice, usage, max_tokens)
    n_prompt = _counted(usage, "prompt_tokens", exact.prompt_ids if exact else None)
    n_response = _counted(usage, "completion_tokens", exact.response_ids if exact else None)
    reason = _finish_reason(choice, usage, max_tokens)
    if usage.get("completion_tokens") == 0 and reason != "abort":
        raise ValueError(f"no tokens, but finish reason {reason!r}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None and count(cached) > n_prompt + n_response:
        raise ValueError(f"{cached} tokens cached of {n_prompt}")
    tokens = replace(
        exact or SampledTokens(finish_reason=reason),
        stop_reason=stop_reason(choice.get("stop_reason", choice.get("matched_stop"))),
        n_cached_tokens=cached,
    )
    return Completion(
        **field_values(tokens, SampledTokens),
        response=_message(choice["message"]),
        engine=engine,
        n_prompt_tokens=n_prompt,
        n_response_tokens=n_response,
        policy_version=_version(answer, choice),
    )


def _counted(usage: dict[str, Any], name: str, ids: TokenIds | None) -> int:
    """Return the number of tokens that the engine counted, else the number of ids."""
    result = usage.get(name)
    if result is not None:
        return count(result)
    return 0 if ids is None else len(ids)


def _finish_reason(choice: dict[str, Any], usage: dict[str, Any], max_tokens: int | None) -> str:
    """Return the finish reason. Null means `length` if the limit is reached, else `stop`."""
    if "finish_reason" not in choice or choice["finish_reason"] is not None:
        return finish_reason(choice.get("finish_reason"))
    return "length" if max_tokens is not None and (usage.get("completion_tokens") or 0) >= max_tokens else "stop"


def _message(sent: dict[str, Any]) -> Message:
    """Return the message for the history: unset fields are omitted, every tool call has an id."""
    content, thought = _content(sent.get("content"))
    message: Message = {"role": "assistant", "content": content}
    # vLLM's name is `reasoning`; SGLang and the chat templates use `reasoning_content`.
    reasoning = _text(sent.get("reasoning_content")) or _text(sent.get("reasoning")) or thought
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = sent.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return message


def _content(found: Any) -> tuple[str, str]:
    """Return the text of a message, and the reasoning among its parts."""
    if not isinstance(found, list):
        return _text(found), ""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in found:
        if isinstance(part, str):
            texts["text"].append(part)
        elif part["type"] in ("text", "output_text"):
            texts["text"].append(_text(part["text"]))
        elif part["type"] == "thinking":
            # Mistral nests parts of text
            texts["thinking"].append(_content(part["thinking"])[0])
        else:
            raise ValueError(f"content has a part of type {str(part['type'])[:40]!r}, which is not text")
    return "".join(texts["text"]), "".join(texts["thinking"])


def _text(found: Any) -> str:
    if found is None or isinstance(found, str):
        return found or ""
    raise ValueError(f"text is a {type(found).__name__}")


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": _text(call.get("id")) or f"call_{index}",
        "type": "function",
        "function": {"name": _text(function.get("name")), "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(found: Any) -> str:
    """Return arguments as JSON text, as the API requires; some servers send the value itself."""
    return _text(found) if found is None or isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _exact(
    answer: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any], max_tokens: int | None
) -> Generation | None:
    """Return the generation; None if ids or log-probabilities are missing. An empty list of ids is an error."""
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids", choice.get("response_token_ids"))
    entries = (choice.get("logprobs") or {}).get("content")
    if not prompt or response is None or entries is None:
        return None
    if usage.get("prompt_tokens", len(prompt)) != len(prompt):
        raise ValueError(f"{len(prompt)} prompt ids, {usage['prompt_tokens']} tokens counted")
    builder = GenerationBuilder(token_ids(()), max_tokens)
    builder.saw(prompt)
    builder.add(response, [entry["logprob"] for entry in entries])
    builder.n_counted = usage.get("completion_tokens", len(response))
    builder.end(_finish_reason(choice, usage, max_tokens))
    builder.spans(choice.get("weight_versions") or answer.get("weight_versions"))
    whole = (answer.get("metadata") or {}).get("weight_version")
    if whole is not None and not builder.versions and len(response):
        builder.versions = (VersionSpan(version(whole), 0, len(response)),)
    return builder.generation()


def _version(answer: dict[str, Any], choice: dict[str, Any]) -> str:
    """Return the version of the weights; the oldest if it changed meanwhile, to never understate staleness."""
    spans = choice.get("weight_versions") or answer.get("weight_versions") or []
    if spans:
        return version(spans[0]["version"])
    return version((answer.get("metadata") or {}).get("weight_version"))

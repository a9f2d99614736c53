"""An answer of Anthropic's messages API, whole or as server-sent events.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import ApiProblem


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """The parts of a completion that are sent to the client."""

    message_id: str
    model: str
    thinking: str
    text: str
    tool_uses: tuple[tuple[str, str, Mapping[str, Any]], ...]
    stop_reason: str
    stop_sequence: str | None
    n_prompt_tokens: int
    n_cached_tokens: int
    n_response_tokens: int

    def message(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if self.thinking:
            content.append({"type": "thinking", "thinking": self.thinking, "signature": ""})
        if self.text:
            content.append({"type": "text", "text": self.text, "citations": None})
        content += [_tool_use(call_id, name, result) for call_id, name, result in self.tool_uses]
        return {
            **_head(self.message_id, self.model),
            "content": content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, Any]:
        """Return the usage; this API counts tokens from the engine's cache separately."""
        return {
            "input_tokens": self.n_prompt_tokens - self.n_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.n_cached_tokens,
            "output_tokens": self.n_response_tokens,
        }


class MessagesEvents:
    """The `model_api.Events` of this API: one block after another, each started, filled and stopped."""

    def __init__(self, message_id: str, model: str, thinks: bool, shown: Callable[[Completion], ShownMessage]) -> None:
        self._message_id = message_id
        self._model = model
        self._thinks = thinks
        self._shown = shown
        self._index = -1
        self._open = ""
        self._sent = {"thinking": "", "text": ""}

    def begin(self) -> bytes:
        # The number of prompt tokens is known only after the answer; `message_delta` reports it.
        usage = {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        head = _head(self._message_id, self._model)
        message = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning and not self._thinks:
            return self.ping()
        return self._say("thinking" if delta.reasoning else "text", delta.text)

    def ping(self) -> bytes:
        return _event("ping")

    def end(self, completion: Completion) -> bytes:
        shown = self._shown(completion)
        pieces = [
            self._say("thinking", model_api.rest(shown.thinking, self._sent["thinking"])),
            self._say("text", model_api.rest(shown.text, self._sent["text"])),
            self._stop(),
        ]
        for call_id, name, result in shown.tool_uses:
            pieces.append(self._start("tool_use", _tool_use(call_id, name, {})))
            pieces.append(self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(result).decode()}))
            pieces.append(self._stop())
        ended = {"stop_reason": shown.stop_reason, "stop_sequence": shown.stop_sequence}
        pieces.append(_event("message_delta", delta=ended, usage=shown.usage()))
        return b"".join([*pieces, _event("message_stop")])

    def error(self, problem: ApiProblem) -> bytes:
        return _event("error", error={"type": "api_error", "message": problem.message})

    def _say(self, kind: str, text: str) -> bytes:
        """Return a piece of thinking or text, in the open block if it is of that kind."""
        if not text:
            return b""
        pieces = []
        if self._open != kind:
            pieces.append(self._stop())
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {"citations": None})}
            pieces.append(self._start(kind, block))
        self._sent[kind] += text
        return b"".join([*pieces, self._delta({"type": f"{kind}_delta", kind: text})])

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return model_api.event({"type": kind, **fields}, kind)


def _head(message_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _tool_use(call_id: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}

"""The answers of /v1/chat/completions: sampled text, parsed into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.doubles.vllm.answer_text import TextResponseWriter, TextStream
from tests.doubles.vllm.requests import VllmChatBody
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.vllm.sampling import CREATED, spans, usage
from workers.testing.engine.web import SamplingRequest
from workers.testing.hermes_text import CALL, THINK, THINK_END, HermesCall, reasoned, strict_calls, tool_call


class ChatAnswer:
    """The answer of one call. `n_before` makes its tool calls' numbers differ from those of earlier turns."""

    def __init__(
        self,
        machine: Machine,
        request: VllmChatBody,
        sampling_request: SamplingRequest,
        *,
        prompt_text: str,
        fingerprint: str,
        versions: bool,
    ) -> None:
        self._machine = machine
        self._request = request
        self._sampling_request = sampling_request
        self._prompt_text = prompt_text if request.return_prompt_text else None
        self._fingerprint = fingerprint
        self._versions = versions and bool(request.return_weight_versions)
        self._n_before = sum(message.get("role") == "assistant" for message in request.messages)
        self._teller = TextResponseWriter(machine, as_ids=bool(request.return_tokens_as_token_ids))
        self._texts: dict[int, TextStream] = {}
        self._shown: dict[int, _Shown] = {}

    def whole(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, run) for index, run in enumerate(runs)],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage(runs, 1, created=0),
            "prompt_logprobs": None,
            "prompt_token_ids": self._seen(runs[0]),
            "prompt_text": self._prompt_text,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, runs: Sequence[EngineRun]) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        for index in range(self._request.n):
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            head = {**self._head("chat.completion.chunk"), "choices": [choice]}
            yield {**head, "prompt_token_ids": self._seen(runs[0]), "prompt_text": self._prompt_text}

    def chunk(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        stream = self._texts.setdefault(index, TextStream(self._machine, run))
        stream.feed(end, last=last)
        shown = self._shown.setdefault(index, _Shown(self._request.calls_tools))
        delta = shown.delta(stream.text, last=last)
        if not self._request.include_reasoning:
            delta.pop("reasoning", None)
        if last and shown.calls:
            delta["tool_calls"] = [
                {"index": at, **tool_call(call, self._call_id(index, at))} for at, call in enumerate(shown.calls)
            ]
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(run, begin, end),
            "finish_reason": ("tool_calls" if shown.calls else run.finish_reason) if last else None,
        }
        if last:
            choice["stop_reason"] = run.stop_reason
            if self._versions:
                choice["weight_versions"] = spans(run)
        if self._request.return_token_ids:
            choice["token_ids"] = run.ids[begin:end]
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def closing(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": usage(runs, 1, created=0, brief=True),
            "system_fingerprint": self._fingerprint,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._sampling_request.request_id,
            "object": kind,
            "created": CREATED,
            "model": self._machine.name,
        }

    def _seen(self, run: EngineRun) -> Any:
        return run.prompt if self._request.return_token_ids else None

    def _call_id(self, index: int, at: int) -> str:
        return f"call_{self._n_before}_{at}" if not index else f"call_{self._n_before}_{index}_{at}"

    def _logprobs(self, run: EngineRun, begin: int, end: int) -> dict[str, Any] | None:
        return (
            self._teller.of_chat(run, begin, end, self._request.top_logprobs or 0) if self._request.logprobs else None
        )

    def _choice(self, index: int, run: EngineRun) -> dict[str, Any]:
        reasoning, visible = reasoned(self._machine.text(run))
        content, calls = strict_calls(visible) if self._request.calls_tools else (visible, ())
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls or reasoning else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": (reasoning or None) if self._request.include_reasoning else None,
        }
        if calls:
            message["tool_calls"] = [tool_call(call, self._call_id(index, at)) for at, call in enumerate(calls)]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(run, 0, run.n_sampled),
            "finish_reason": "tool_calls" if calls else run.finish_reason,
            "stop_reason": run.stop_reason,
            "token_ids": run.ids if self._request.return_token_ids else None,
            "routed_experts": None,
        }
        return {**choice, "weight_versions": spans(run)} if self._versions else choice


class _Shown:
    """Progress of a stream through a turn's reasoning and text; a possible beginning of a tag is held back."""

    def __init__(self, calls_tools: bool) -> None:
        self._calls_tools = calls_tools
        self._n_reasoning = 0
        self._n_content = 0
        self.calls: tuple[HermesCall, ...] = ()

    def delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return the new part of a text that has grown to this."""
        if not last and THINK.startswith(text):
            return {}
        reasoning, visible = reasoned(text)
        if text.startswith(THINK) and THINK_END not in text and not last:
            reasoning = _without_begun(reasoning, THINK_END)
        content = visible
        if self._calls_tools:
            whole, self.calls = strict_calls(visible) if last else ("", ())
            content = whole if last else _without_begun(visible.partition(CALL)[0], CALL)
        result = {"reasoning": reasoning[self._n_reasoning :], "content": content[self._n_content :]}
        self._n_reasoning, self._n_content = len(reasoning), len(content)
        return {name: new for name, new in result.items() if new}


def _without_begun(text: str, tag: str) -> str:
    """Return the text without an end that may be the beginning of a tag."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:n]):
            return text[:-n]
    return text

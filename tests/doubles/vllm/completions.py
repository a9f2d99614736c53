"""The answers of /v1/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.doubles.vllm.answer_text import TextResponseWriter, TextStream
from tests.doubles.vllm.requests import VllmCompletionsBody
from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.simulated_values import npy_of
from workers.testing.engine.vllm.sampling import CREATED, spans, usage
from workers.testing.engine.web import SamplingRequest


class CompletionsAnswer:
    """The response of one call; `sampling_requests` has a request for each prompt."""

    def __init__(
        self,
        machine: Machine,
        request: VllmCompletionsBody,
        sampling_requests: Sequence[SamplingRequest],
        *,
        name: str,
        fingerprint: str,
        versions: bool,
    ) -> None:
        self._machine = machine
        self._request = request
        self._sampling_requests = sampling_requests
        self._name = name
        self._fingerprint = fingerprint
        self._texts: dict[int, TextStream] = {}
        self._offsets: Counter[int] = Counter()
        self._versions = versions and bool(request.return_weight_versions)

    def whole(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            **self._head(),
            "choices": [self._choice(index, run) for index, run in enumerate(runs)],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage(runs, len(self._sampling_requests)),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, runs: Sequence[EngineRun]) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        request = self._request
        choice: dict[str, Any] = {
            "index": index,
            "text": self._texts.setdefault(index, TextStream(self._machine, run)).feed(end, last=last),
            "logprobs": self._logprobs(index, run, begin, end),
            "finish_reason": run.finish_reason if last else None,
            "stop_reason": run.stop_reason if last else None,
            "prompt_token_ids": run.prompt if request.return_token_ids and not begin else None,
            "token_ids": run.ids[begin:end] if request.return_token_ids else None,
        }
        if last and self._versions:
            choice["weight_versions"] = spans(run)
        return {**self._head(), "choices": [choice]}

    def closing(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            **self._head(),
            "choices": [],
            "usage": usage(runs, len(self._sampling_requests), brief=True),
            "system_fingerprint": self._fingerprint,
        }

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "text_completion",
            "created": CREATED,
            "model": self._machine.name,
        }

    def _logprobs(self, index: int, run: EngineRun, begin: int, end: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        teller = TextResponseWriter(self._machine, as_ids=bool(self._request.return_tokens_as_token_ids))
        result = teller.of_completions(run, begin, end, self._offsets[index])
        self._offsets[index] += sum(map(len, result["tokens"]))
        return result

    def _choice(self, index: int, run: EngineRun) -> dict[str, Any]:
        request = self._request
        choice = {
            "index": index,
            "text": self._machine.text(run),
            "logprobs": self._logprobs(index, run, 0, run.n_sampled),
            "finish_reason": run.finish_reason,
            "stop_reason": run.stop_reason,
            "token_ids": run.ids if request.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": run.prompt if request.return_token_ids else None,
            "routed_experts": npy_of(self._machine.experts, run, request.routed_experts_prompt_start),
        }
        return {**choice, "weight_versions": spans(run)} if self._versions else choice

"""The answers of /inference/v1/generate: ids and log-probabilities together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.expert_routing import npy_of
from workers.testing.engine.model_request import SamplingRequest
from workers.testing.engine.run import EngineRun
from workers.testing.engine.vllm.answer_fields import CREATED, ResponseWriter, spans, usage
from workers.testing.engine.vllm.requests import VllmGenerateBody


class GenerateAnswer:
    """The answer to one call."""

    def __init__(self, machine: Machine, request: VllmGenerateBody, sampling_request: SamplingRequest) -> None:
        self._machine = machine
        self._request = request
        self._sampling_request = sampling_request
        self._writer = ResponseWriter(machine)
        self._first_expert = request.sampling_params.routed_experts_prompt_start

    def whole(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            "request_id": self._sampling_request.request_id,
            "model": self._machine.name,
            "created": CREATED,
            "usage": usage(runs, 1),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": runs[0].prompt if self._request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self._request.output_mode,
            "choices": [self.choice(index, run, 0, run.n_sampled, last=True) for index, run in enumerate(runs)],
        }

    def opening(self, runs: Sequence[EngineRun]) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        echo = {"prompt_token_ids": run.prompt}
        return {
            "request_id": self._sampling_request.request_id,
            "usage": None,
            **(echo if self._request.return_token_ids and not begin else {}),
            "output_mode": self._request.output_mode,
            "choices": [self.choice(index, run, begin, end, last=last)],
        }

    def closing(self, runs: Sequence[EngineRun]) -> dict[str, Any]:
        return {
            "request_id": self._sampling_request.request_id,
            "usage": usage(runs, 1, brief=True),
            "output_mode": self._request.output_mode,
            "choices": [],
        }

    def choice(self, index: int, run: EngineRun, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        """Return the ids [begin, end) of one sample with their metadata."""
        has_logprobs = self._request.sampling_params.logprobs is not None
        return {
            "index": index,
            "finish_reason": run.finish_reason if last else None,
            "stop_reason": run.stop_reason if last else None,
            "token_ids": run.ids[begin:end],
            "routed_experts": npy_of(self._machine.experts, run, self._first_expert) if last else None,
            "sampling_mask": None,
            "weight_versions": spans(run) if last else None,
            "logprobs": self._writer.of_generate(run, begin, end) if has_logprobs else None,
        }

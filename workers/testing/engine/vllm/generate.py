"""The answers of /inference/v1/generate: ids and log-probabilities side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workers.testing.engine.asked import Asked
from workers.testing.engine.machine import Machine
from workers.testing.engine.run import Run
from workers.testing.engine.vllm.requests import Generate
from workers.testing.engine.vllm.telling import CREATED, Teller, TextStream, spans, usage


class GenerateAnswer:
    """One call's."""

    def __init__(self, machine: Machine, request: Generate, asked: Asked) -> None:
        self._machine = machine
        self._request = request
        self._asked = asked
        self._teller = Teller(machine, asked)
        self._texts: dict[int, TextStream] = {}

    def whole(self, runs: Sequence[Run]) -> dict[str, Any]:
        return {
            "request_id": self._asked.request_id,
            "model": self._machine.name,
            "created": CREATED,
            "usage": usage(runs, 1),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._machine.seen(self._asked) if self._request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self._request.output_mode,
            "choices": [self._choice(index, run, 0, run.n_sampled, last=True) for index, run in enumerate(runs)],
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunk(self, index: int, run: Run, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        echo = {"prompt_token_ids": self._machine.seen(self._asked)}
        return {
            "request_id": self._asked.request_id,
            "usage": None,
            **(echo if self._request.return_token_ids and not begin else {}),
            "output_mode": self._request.output_mode,
            "choices": [self._choice(index, run, begin, end, last=last)],
        }

    def closing(self, runs: Sequence[Run]) -> dict[str, Any]:
        return {
            "request_id": self._asked.request_id,
            "usage": usage(runs, 1, brief=True),
            "output_mode": self._request.output_mode,
            "choices": [],
        }

    def _choice(self, index: int, run: Run, begin: int, end: int, *, last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": run.finish_reason if last else None,
            "stop_reason": run.stop_reason if last else None,
            "token_ids": run.ids[begin:end],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans(run) if last else None,
        }
        as_text = self._request.output_mode == "text"
        if as_text:
            text = self._texts.setdefault(index, TextStream(self._machine, run))
            choice["text"] = text.feed(end, last=last)
        choice["logprobs"] = None
        if self._request.sampling_params.logprobs is not None:
            choice["logprobs"] = (
                self._teller.of_chat(run, begin, end, 1) if as_text else self._teller.of_generate(run, begin, end)
            )
        return choice

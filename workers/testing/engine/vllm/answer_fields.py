"""Common parts of vLLM's responses: usage, weight versions, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.logprobs import rank
from workers.testing.engine.run import EngineRun

CREATED = 1_767_225_600
"""Creation time in responses: constant, so that responses are reproducible."""


def usage(
    runs: Sequence[EngineRun], n_prompts: int, *, created: int | None = None, brief: bool = False
) -> dict[str, Any]:
    """Return the usage of an answer, or of a stream's last chunk, which omits unset fields."""
    n_prompt = sum(len(run.prompt) for run in runs[:: max(len(runs) // n_prompts, 1)])
    n_sampled = sum(run.n_sampled for run in runs)
    details: dict[str, Any] = {"cached_tokens": runs[0].n_cached}
    details |= {"created_cache_tokens": created, "multimodal_tokens": None}
    if brief:
        details = {name: value for name, value in details.items() if value is not None}
    whole = {
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_sampled,
        "completion_tokens": n_sampled,
        "prompt_tokens_details": details,
    }
    return whole if brief else {**whole, "completion_tokens_details": None}


def spans(run: EngineRun) -> list[dict[str, Any]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in run.spans]


class ResponseWriter:
    """Formats the ids [begin, end) of a run."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def logprobs(self, run: EngineRun, begin: int, end: int) -> list[float]:
        values: list[float] = self._machine.logprobs(run, begin, end).astype(float).tolist()
        return values

    def of_generate(self, run: EngineRun, begin: int, end: int) -> dict[str, Any]:
        whole = [
            {"token_id": id_, "logprob": value, "rank": rank(value)}
            for id_, value in zip(
                run.ids[begin:end].tolist(),
                self.logprobs(run, begin, end),
                strict=False,
            )
        ]
        return {"content": [{**one, "top_logprobs": [one]} for one in whole]}

"""Common parts of SGLang's two sampling routes: prompts, their refusals, and the finish reason of a run."""

from __future__ import annotations

import uuid
from typing import Any

from farm.records.trajectory import TokenIds
from tests.doubles.double_machine import DoubleMachine
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.web import RequestRefused, SamplingRequest, ids_of


class RequestReader:
    """Reads requests for one machine."""

    def __init__(self, machine: DoubleMachine) -> None:
        self._machine = machine

    def prompt(self, text: str | None, ids: Any) -> TokenIds:
        if (text is None) == (ids is None):
            raise RequestRefused("Either text or input_ids should be provided.")
        vocabulary = self._machine.vocabulary
        if text is not None:
            prompt = vocabulary.encode(text)
        else:
            prompt = ids_of(ids, vocabulary.size, "The input_ids contain values greater than the vocab size ({size}).")
        if not len(prompt):
            raise RequestRefused("The input is empty.")
        return prompt

    def sampling_request(
        self,
        rid: str | None,
        prompt: TokenIds,
        max_tokens: int | None,
        *,
        stop: str | list[str] | None,
        **sampling: Any,
    ) -> SamplingRequest:
        context = self._machine.context_tokens
        if len(prompt) >= context:
            raise RequestRefused(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            )
        if max_tokens is not None and len(prompt) + max_tokens > context:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {len(prompt) + max_tokens} tokens: {len(prompt)} tokens from the input messages and "
                f"{max_tokens} tokens for the completion."
            )
        return SamplingRequest(
            request_id=rid or uuid.uuid4().hex,
            prompt=prompt,
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            **sampling,
        )

    def logprobs(self, run: EngineRun, n: int, temperature: float, *, texts: bool = False) -> list[list[Any]]:
        """Return [log-probability, id, its text] of the first n ids."""
        values = self._machine.logprobs(run, 0, n, temperature).astype(float).tolist()
        shown = self._machine.vocabulary.shown_as
        return [
            [value, id_, shown[id_] if texts else None]
            for value, id_ in zip(values, run.ids[:n].tolist(), strict=False)
        ]


def finish(run: EngineRun) -> dict[str, Any]:
    if run.finish_reason == "stop":
        return {"type": "stop", "matched": int(run.ids[-1]) if run.stop_reason is None else run.stop_reason}
    if run.finish_reason == "length":
        return {"type": "length", "length": run.n_sampled}
    return {"type": "abort", "message": "Abort in waiting queue or while running", "status_code": None}

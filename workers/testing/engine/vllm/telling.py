"""What vLLM's three answers have in common: usage, log-probabilities in their shapes, and text that is streamed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from workers.testing.engine.asked import Asked
from workers.testing.engine.logprobs import rank
from workers.testing.engine.machine import Machine
from workers.testing.engine.run import Run

CREATED = 1_767_225_600
"""When answers say that they were made: always the same, so that answers are reproducible."""


def usage(runs: Sequence[Run], n_prompts: int, *, created: int | None = None, brief: bool = False) -> dict[str, Any]:
    """As in an answer, or as in a stream's last chunk, which leaves out what is unset."""
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


def spans(run: Run) -> list[dict[str, Any]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in run.spans]


class Teller:
    """Tells of the ids [begin, end) of a run, in the ways of the three endpoints."""

    def __init__(self, machine: Machine, asked: Asked, *, as_ids: bool = False) -> None:
        self._machine = machine
        self._asked = asked
        self._as_ids = as_ids

    def logprobs(self, run: Run, begin: int, end: int) -> list[float]:
        found = self._machine.logprobs(run, begin, end)
        if self._asked.fault == "lengths" and run.ended and end == run.n_sampled:
            found = found[:-1]
        values: list[float] = found.astype(float).tolist()
        return values

    def tokens(self, run: Run, begin: int, end: int) -> list[str]:
        ids: list[int] = run.ids[begin:end].tolist()
        if self._as_ids:
            return [f"token_id:{id_}" for id_ in ids]
        shown = self._machine.vocabulary.shown_as
        return [shown[id_] for id_ in ids]

    def of_completions(self, run: Run, begin: int, end: int, offset: int = 0) -> dict[str, Any]:
        """Four lists; `offset` is how long the tokens before were."""
        tokens, values = self.tokens(run, begin, end), self.logprobs(run, begin, end)
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=False)],
        }

    def of_chat(self, run: Run, begin: int, end: int, n_top: int) -> dict[str, Any]:
        tokens, values = self.tokens(run, begin, end), self.logprobs(run, begin, end)
        shown = self._machine.vocabulary.shown_as
        whole = [
            {"token": token, "logprob": value, "bytes": list(shown[id_].encode())}
            for token, value, id_ in zip(tokens, values, run.ids[begin:end].tolist(), strict=False)
        ]
        return {"content": [{**one, "top_logprobs": [one] if n_top else []} for one in whole]}

    def of_generate(self, run: Run, begin: int, end: int) -> dict[str, Any]:
        whole = [
            {"token_id": id_, "logprob": value, "rank": rank(value)}
            for id_, value in zip(
                run.ids[begin:end].tolist(),
                self.logprobs(run, begin, end),
                strict=False,
            )
        ]
        return {"content": [{**one, "top_logprobs": [one]} for one in whole]}


class TextStream:
    """The text of a run as it grows; parts of a character wait for the rest of it."""

    def __init__(self, machine: Machine, run: Run) -> None:
        self._machine = machine
        self._run = run
        self._n_ids = 0
        self.text = ""

    def feed(self, end: int, *, last: bool) -> str:
        """What the ids up to `end` add."""
        more = self._machine.vocabulary.decode(self._run.ids[self._n_ids : end])
        if more.endswith("�") and not last:
            return ""
        self._n_ids = end
        before = self.text
        self.text = (before + more)[: self._run.plan.text_end]
        return self.text[len(before) :]

"""The scripted engine without a wire format: a vocabulary, a source of turns, a scheduler and a cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from farm.records.trajectory import LogProbs, TokenIds
from workers.testing.engine.scheduler import EngineRun, SamplingPlan, Scheduler
from workers.testing.engine.simulated_values import ExpertRouting, scored
from workers.testing.engine.turn_sources import TurnSource
from workers.testing.engine.vocabulary import Vocabulary
from workers.testing.engine.web import RequestRefused, SamplingRequest


@dataclass(eq=False)
class Machine:
    """One model: `name`, `root`, the folder of its text files, and `context_tokens`, its context window."""

    vocabulary: Vocabulary
    turn_source: TurnSource
    scheduler: Scheduler
    name: str
    root: Path
    context_tokens: int
    seed: int = 0
    experts: ExpertRouting | None = None
    """The routing that it reports; None as on a server without the flag."""
    healthy: bool = True
    loaded: list[str] = field(default_factory=list)
    """The paths from which it was ordered to load weights."""

    def run(self, request: SamplingRequest, index: int = 0) -> EngineRun:
        """Return a run that has not started. Raises RequestRefused if the prompt leaves no room."""
        self._check_room(request.prompt)
        suffix = f"-{index}" if request.n > 1 else ""
        return EngineRun(f"{request.request_id}{suffix}", request.prompt, self._plan(request, index), request.salt)

    def sample(self, run: EngineRun) -> AsyncIterator[int]:
        """Sample by the scheduler. Raises RequestRefused if its queue is full."""
        if self.scheduler.full:
            self.scheduler.n_rejected += 1
            raise RequestRefused(
                "The server is overloaded; please retry later.", status=503, kind="Service Unavailable"
            )
        return self.scheduler.sample(run)

    def text(self, run: EngineRun) -> str:
        """Return the text sampled so far, without special tokens, cut at the stop."""
        return self.vocabulary.decode(run.ids)[: run.plan.text_end if run.ended else None]

    def logprobs(self, run: EngineRun, begin: int, end: int) -> LogProbs:
        """Return those of the run's ids [begin, end), each under the weights that sampled it."""
        ids = np.concatenate([run.prompt, run.ids])
        n_prompt = len(run.prompt)
        logprobs = [
            scored(ids[: n_prompt + span.end], n_prompt + span.start, span.version, self.seed) for span in run.spans
        ]
        return np.concatenate([np.zeros(0, np.float32), *logprobs])[begin:end]

    def _check_room(self, prompt: TokenIds) -> None:
        if len(prompt) >= self.context_tokens:
            raise RequestRefused(
                f"This model's maximum context length is {self.context_tokens} tokens. However, your prompt contains "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                param="input_tokens",
            )

    def _plan(self, request: SamplingRequest, index: int) -> SamplingPlan:
        room = self.context_tokens - len(request.prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        ids = self.turn_source.turn(request.prompt, request.seed_of(index))
        if request.ignore_eos:
            draw, n = np.random.default_rng([self.seed, len(request.prompt)]), max(limit - len(ids), 0)
            ids = np.concatenate([ids, draw.integers(0, self.vocabulary.n_plain, n, np.int32)])
        whole = not request.ignore_eos and len(ids) <= limit
        plan = SamplingPlan(ids[:limit], "stop" if whole else "length")
        return self._stopped(request, plan)

    def _stopped(self, request: SamplingRequest, plan: SamplingPlan) -> SamplingPlan:
        ids = plan.ids
        if request.stop_token_ids:
            ends = np.flatnonzero(np.isin(ids, list(request.stop_token_ids)))
            if len(ends) and ids[ends[0]] != self.vocabulary.end_id:
                n = int(ends[0])
                plan = SamplingPlan(ids[: n + 1], "stop", int(ids[n]), len(self.vocabulary.decode(ids[:n])))
        text = self.vocabulary.decode(plan.ids) if request.stop else ""
        hits = [(at, stop) for stop in request.stop if (at := text.find(stop)) >= 0]
        if not hits:
            return plan
        at, stop = min(hits)
        return SamplingPlan(plan.ids[: self._reaches(plan.ids, at + len(stop))], "stop", stop, at)

    def _reaches(self, ids: TokenIds, n_characters: int) -> int:
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.vocabulary.decode(ids[:middle]).rstrip("�")) >= n_characters:
                high = middle
            else:
                low = middle + 1
        return low

"""A verifiers taskset: sums, with one reward for the number and one for brevity."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A sum and its result."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Scored only by its reply."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 10)


class Sums(vf.Taskset[SumTask]):
    """Three tasks."""

    def load(self) -> Iterable[SumTask]:
        for number in range(3):
            prompt = f"What is {number} + {number}?"
            yield SumTask(SumData(prompt=prompt, answer=str(2 * number)), self.config.task)

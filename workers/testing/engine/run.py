"""One generation of the double: its planned ids, its progress, and the weights that sampled them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from farm.records.trajectory import TokenIds, VersionSpan


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """All that will be sampled unless it is cut, and the end then."""

    ids: TokenIds
    finish_reason: str
    stop_reason: str | int | None = None
    text_end: int | None = None
    """Position at which a stop string cuts the text; the ids are not cut."""


@dataclass(slots=True, eq=False)
class EngineRun:
    """`n_sampled` ids of the plan are sampled so far; `spans` cover them. `extra_s` is a delay of this run only."""

    run_id: str
    prompt: TokenIds
    plan: SamplingPlan
    salt: str = ""
    extra_s: float = 0.0
    n_sampled: int = 0
    n_cached: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False
    late: bool = False
    """It arrived during a pause."""
    nudge: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.aborted or self.n_sampled >= len(self.plan.ids)

    @property
    def ids(self) -> TokenIds:
        return self.plan.ids[: self.n_sampled]

    @property
    def finish_reason(self) -> str:
        """The finish reason; only of an ended run."""
        return "abort" if self.n_sampled < len(self.plan.ids) else self.plan.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return None if self.n_sampled < len(self.plan.ids) else self.plan.stop_reason

    def sample(self, n: int, version: str) -> None:
        """Take the next n ids under these weights."""
        end = min(self.n_sampled + n, len(self.plan.ids))
        if end > self.n_sampled:
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
            else:
                self.spans.append(VersionSpan(version, self.n_sampled, end))
        self.n_sampled = end

    def abort(self) -> None:
        self.aborted = True
        self.nudge.set()

"""The histograms of a farm: their names, labels and buckets, and the counts of one."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farm.records.rollout import Outcome, Stage
from farm.retry_policy import CAUSES

_LARGEST = sys.float_info.max
_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_REWARDS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0)
"""No bound is below 0, as such a histogram would have no sum. Rewards may be negative, so use `delta` on theirs."""


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """One histogram, or a counter if it has no buckets. `bounds` are the upper bounds of its buckets.

    All values of its label are known in advance, so that rollouts cannot add others.
    """

    name: str
    what: str
    bounds: Sequence[float]
    label: str = ""
    values: Sequence[str] = ("",)


REWARDS = HistogramKind("farm_reward", "Rewards that were given", _REWARDS)
TOKENS = HistogramKind("farm_response_tokens", "Tokens that the policy sampled in a played rollout", _TOKENS)
TURNS = HistogramKind("farm_turns", "Turns of a played rollout", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0))
CALLS = HistogramKind("farm_model_call_seconds", "Seconds that an engine took for one call", _SECONDS)
WORK = HistogramKind("farm_stage_seconds", "Seconds of work on a stage", _SECONDS, "stage", [*map(str, Stage)])
QUEUED = HistogramKind("farm_stage_queue_seconds", "Seconds a stage waited", _SECONDS, "stage", [*map(str, Stage)])
ROLLOUTS = HistogramKind("farm_rollout_seconds", "Seconds from the submit of a rollout to its end", _SECONDS)
ENDED = HistogramKind("farm_rollouts_ended", "Rollouts that have ended", (), "outcome", [*map(str, Outcome)])
ATTEMPTS = HistogramKind(
    "farm_attempts_ended", "Stages of attempts that have ended", (), "result", ["advanced", "completed", *CAUSES]
)

KINDS = {kind.name: kind for kind in (REWARDS, TOKENS, TURNS, CALLS, WORK, QUEUED, ROLLOUTS, ENDED, ATTEMPTS)}


@dataclass(slots=True)
class Counts:
    """The number of values in each bucket of a histogram, and their sum."""

    kind: HistogramKind
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.kind.bounds) + 1:
            # no counts, or counts of a version with other buckets
            self.counts, self.total = [0] * (len(self.kind.bounds) + 1), 0.0

    def count(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.kind.bounds, value)] += 1
            self._add_total(value)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add counts of another process."""
        self.counts = [one + other for one, other in zip(self.counts, counts, strict=True)]
        self._add_total(total)

    def _add_total(self, value: float) -> None:
        """Add to the sum, which stays finite: two infinite values may have no sum, and SQLite cannot store NaN."""
        self.total = max(-_LARGEST, min(_LARGEST, self.total + value))

    def cumulative(self) -> list[tuple[str, float]]:
        """Return cumulative buckets, as in Prometheus."""
        result, n = [], 0
        for bound, count in zip([*map(repr, self.kind.bounds), "+Inf"], self.counts, strict=True):
            n += count
            result.append((bound, float(n)))
        return result

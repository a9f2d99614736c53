"""Invariants of a batch: counts of its rollouts, whether they add up, and violations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant: the id of the rollout, group or batch, and a sentence about it."""

    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.id}: {self.what}"


@dataclass(frozen=True, slots=True)
class Count:
    """Rollouts of a batch or a group by outcome; `n_in_flight` are queued or active."""

    id: str
    n_submitted: int
    n_completed: int
    n_failed: int
    n_cancelled: int
    n_in_flight: int

    @property
    def n_found(self) -> int:
        return self.n_completed + self.n_failed + self.n_cancelled + self.n_in_flight

    @property
    def holds(self) -> bool:
        """True if every submitted rollout is counted exactly once."""
        return self.n_submitted == self.n_found


@dataclass(frozen=True, slots=True)
class Conservation:
    """The counts of a batch and of each of its groups, in order."""

    batch: Count
    groups: tuple[Count, ...]

    @property
    def off(self) -> tuple[Count, ...]:
        """The counts that do not add up, the batch first."""
        return tuple(count for count in (self.batch, *self.groups) if not count.holds)

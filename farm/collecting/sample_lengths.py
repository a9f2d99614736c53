"""Lengths of samples: sampled tokens, of what trains and of what is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from farm.records.rollout import Group, Rollout


@dataclass(frozen=True, slots=True)
class Lengths:
    """The sampled tokens of the `n_samples` samples of `n_groups` groups, and of the longest of each, in all."""

    n_samples: int = 0
    n_tokens: int = 0
    n_groups: int = 0
    n_longest: int = 0

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Lengths:
        """Return those of groups. A sample that was cancelled counts as far as it came, one that never began does not.

        So where some were cancelled, the true lengths are no less.
        """
        of_groups = [[n for rollout in group.rollouts if (n := _sampled_tokens(rollout))] for group in groups]
        begun = [lengths for lengths in of_groups if lengths]
        return cls(sum(map(len, begun)), sum(map(sum, begun)), len(begun), sum(map(max, begun)))

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(*(a + b for a, b in zip(self.record(), other.record(), strict=True)))

    @property
    def mean_tokens(self) -> float:
        """The mean over the samples; 0 of none."""
        return self.n_tokens / max(1, self.n_samples)

    @property
    def mean_longest_tokens(self) -> float:
        """The mean over the groups of the longest sample of each; 0 of none."""
        return self.n_longest / max(1, self.n_groups)

    def record(self) -> list[int]:
        """Return what a record holds of them."""
        return [self.n_samples, self.n_tokens, self.n_groups, self.n_longest]


def _sampled_tokens(rollout: Rollout) -> int:
    # of one that was cancelled in the midst, only its rows know
    return rollout.n_response_tokens or sum(int(segment.response_mask.sum()) for segment in rollout.segments)

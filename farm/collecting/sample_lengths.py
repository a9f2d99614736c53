"""Lengths of samples in sampled tokens: of those that train and of those that were requested."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from farm.collecting.group_decisions import usable
from farm.records.rollout import Group, Outcome, Rollout, State


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sampled tokens: `n_tokens` of `n_samples` that finished, and `n_longest` of the longest sample of `n_groups`."""

    n_samples: int = 0
    n_tokens: int = 0
    n_groups: int = 0
    n_longest: int = 0

    @classmethod
    def of_trained(cls, groups: Iterable[Group]) -> Lengths:
        """Return the lengths of the samples of groups that can train."""
        lengths = [[rollout.n_response_tokens for rollout in group.rollouts if usable(rollout)] for group in groups]
        samples = [n for group in lengths for n in group]
        return cls(len(samples), sum(samples), len(lengths), sum(max(group, default=0) for group in lengths))

    @classmethod
    def of_requested(cls, groups: Iterable[Group], kept: Collection[str] = ()) -> Lengths:
        """Return the lengths of the samples of groups. Of stopped samples, the tokens count but not the samples.

        So the mean is the tokens per finished sample, like total time on test divided by failures. A stopped sample
        counts for the longest of its group with its tokens so far. Samples in `kept` count where they train.
        """
        total = cls()
        for group in groups:
            finished = [each for each in group.rollouts if usable(each)]
            stopped = {each.rollout_id: _tokens_so_far(each) for each in group.rollouts if _was_stopped(each)}
            new = [each.n_response_tokens for each in finished if each.rollout_id not in kept]
            longest = max([*stopped.values(), *(each.n_response_tokens for each in finished)], default=0)
            total += cls(len(new), sum(new) + sum(stopped.values()), 1, longest)
        return total

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(*(a + b for a, b in zip(self.record(), other.record(), strict=True)))

    @property
    def mean_tokens(self) -> float:
        """Tokens per sample; 0 without any."""
        return self.n_tokens / max(1, self.n_samples)

    @property
    def mean_longest_tokens(self) -> float:
        """The mean over groups of the tokens of the longest sample; 0 without any."""
        return self.n_longest / max(1, self.n_groups)

    def record(self) -> list[int]:
        """Return the values for a record."""
        return [self.n_samples, self.n_tokens, self.n_groups, self.n_longest]


def _was_stopped(rollout: Rollout) -> bool:
    return rollout.state is State.CANCELLED or rollout.outcome is Outcome.STALE


def _tokens_so_far(rollout: Rollout) -> int:
    # a sample that did not end has its tokens only in its rows
    return rollout.n_response_tokens or sum(int(segment.response_mask.sum()) for segment in rollout.segments)

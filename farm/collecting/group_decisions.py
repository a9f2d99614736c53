"""The decision on a whole group: accepted, dropped with a reason, or requeued; and lengths of samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from farm.records.rollout import Group, Outcome, Rollout, State, is_too_old
from farm.records.trajectory import NO_VERSION, version_number

AcceptGroup: TypeAlias = Callable[[Group], bool]
"""A trainer's own rule (slime's `dynamic_sampling_filter_path`): True accepts a group that nothing else drops."""


class GroupDecision(StrEnum):
    """The fate of a whole group: accepted, dropped because of its samples, or (the last two) requeued."""

    ACCEPTED = "accepted"
    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW_SCORED = "too_few_scored"
    REFUSED = "refused"
    UNFINISHED = "unfinished"
    STALE = "stale"

    @property
    def is_final(self) -> bool:
        """False for a requeued group, which says nothing about its instance."""
        return self not in (GroupDecision.UNFINISHED, GroupDecision.STALE)


def usable(rollout: Rollout) -> bool:
    """Return whether a sample can train: it was scored, and has a training row."""
    return rollout.trainable and any(segment.trainable for segment in rollout.segments)


def decide(group: Group, least: int, *, filtered: bool, accept: AcceptGroup | None = None) -> GroupDecision:
    """Decide on a whole group, whatever its age. `least` is the required number of usable samples.

    `filtered` drops groups whose usable samples all have the same reward: their advantages are 0.
    """
    rewards = [rollout.reward for rollout in group.rollouts if usable(rollout)]
    if len(rewards) < least:
        return GroupDecision.TOO_FEW_SCORED
    if filtered and len(set(rewards)) < 2:
        return GroupDecision.EQUAL_REWARDS
    if accept is not None and not accept(group):
        return GroupDecision.REFUSED
    return GroupDecision.ACCEPTED


def stopped(group: Group, least: int, enough: int | None) -> GroupDecision | None:
    """Return why a group must be requeued, if the farm or the collector stopped samples that it needs.

    A group with cancelled samples needs `enough` usable samples (None: all); one with samples that became too old while
    they ran needs `least`.
    """
    n_usable = sum(usable(rollout) for rollout in group.rollouts)
    is_cancelled = any(rollout.state is State.CANCELLED for rollout in group.rollouts)
    if is_cancelled and n_usable < (len(group.rollouts) if enough is None else enough):
        return GroupDecision.UNFINISHED
    if n_usable < least and any(rollout.outcome is Outcome.STALE for rollout in group.rollouts):
        return GroupDecision.STALE
    return None


def too_old(rollout: Rollout, newest: str, steps_behind: int, max_staleness: int | None) -> bool:
    """Return whether a sample is more than `max_staleness` versions behind the newest weights.

    If weights have no numbers, the steps since its request count instead.
    """
    if max_staleness is None:
        return False
    if rollout.version_min is None or version_number(newest) == NO_VERSION:
        return steps_behind > max_staleness
    return is_too_old(rollout.version_min, newest, max_staleness)


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

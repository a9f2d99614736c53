"""The decision on a whole group: accepted, or dropped and why."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from farm.records.rollout import Group, Rollout, is_too_old
from farm.records.trajectory import NO_VERSION, version_number

AcceptGroup: TypeAlias = Callable[[Group], bool]
"""A rule of a trainer's own (slime's `dynamic_sampling_filter_path`): True to accept what nothing else drops."""


class GroupDecision(StrEnum):
    """The fate of a whole group; all but the first are reasons to drop it."""

    ACCEPTED = "accepted"
    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW_SCORED = "too_few_scored"
    STALE = "stale"
    REFUSED = "refused"


def usable(rollout: Rollout) -> bool:
    """Return whether a sample can train: it was scored, and has a training row."""
    return rollout.trainable and any(segment.trainable for segment in rollout.segments)


def decide(group: Group, least: int, *, filtered: bool, accept: AcceptGroup | None = None) -> GroupDecision:
    """Decide on a whole group, whatever its age. `least` is the usable samples it must have.

    `filtered` drops groups all of whose usable samples have exactly one reward: their advantages are 0.
    """
    rewards = [rollout.reward for rollout in group.rollouts if usable(rollout)]
    if len(rewards) < least:
        return GroupDecision.TOO_FEW_SCORED
    if filtered and len(set(rewards)) < 2:
        return GroupDecision.EQUAL_REWARDS
    if accept is not None and not accept(group):
        return GroupDecision.REFUSED
    return GroupDecision.ACCEPTED


def too_old(group: Group, newest: str, steps_behind: int, max_staleness: int | None) -> bool:
    """Return whether some usable sample is more than `max_staleness` versions behind the newest weights.

    Where weights have no numbers, the steps that lie between its wave and now are counted instead.
    """
    if max_staleness is None:
        return False
    for rollout in group.rollouts:
        if not usable(rollout):
            continue
        if rollout.version_min is None or version_number(newest) == NO_VERSION:
            if steps_behind > max_staleness:
                return True
        elif is_too_old(rollout.version_min, newest, max_staleness):
            return True
    return False

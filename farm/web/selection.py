"""The rollouts of a batch that train, those that do not and why, how the two differ, and the cost of both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from farm.records.rollout import Outcome, State, trainable
from farm.store.reports.rollout_costs import RolloutCost

TRAINS = "trains"
REASONS = {
    TRAINS: "its rows have an advantage",
    "broken": "the farm, or a service that it uses, failed",
    "cancelled": "it was cancelled, for example when its batch was stopped early",
    "stale": "its weights had become too old",
    "not scored": "it has no reward, or was not ended by its policy",
    "no rows": "it has no training row",
    "short group": "fewer than two samples of its group can train",
    "equal rewards": "all samples of its group have the same reward, so no advantage",
    "left out": "its trainer left it out",
}
"""The reasons why a rollout trains or does not, in order of precedence."""


@dataclass(frozen=True, slots=True)
class RankedMeasure:
    """A measure of the rollouts of one reason: its median, and its comparison with the rollouts that train.

    `larger` is the share of pairs in which it is larger than that of a trained one, plus half of the equal pairs; `p`
    is the two-sided probability of a share as far from a half by chance (Mann-Whitney test). None without both kinds.
    """

    measure: str
    median: float | None
    larger: float | None = None
    p: float | None = None


@dataclass(frozen=True, slots=True)
class ReasonShare:
    """The rollouts of one reason: their number, their share of all, and their measures."""

    reason: str
    n: int
    share: float
    differences: Sequence[RankedMeasure]


@dataclass(frozen=True, slots=True)
class CostShare:
    """The cost of the rollouts of one data source, reason or step: means per rollout, in seconds and sampled tokens.

    `lost_share` is the part of its work in attempts that did not count. `per_trained_s` is all work divided by the
    number of rollouts that train; None without one.
    """

    name: str
    n: int
    n_trained: int
    waited_s: float
    worked_s: float
    called_s: float
    called_tokens: float
    lost_share: float
    per_trained_s: float | None


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """The newest ended rollouts of a batch by whether they train."""

    n: int
    reasons: Sequence[ReasonShare]
    by_source: Sequence[CostShare]
    by_reason: Sequence[CostShare]
    by_step: Sequence[CostShare]
    """By the newest step that a trainer annotated a rollout for."""


def selection(costs: Sequence[RolloutCost], n_samples: int, shown: Collection[str] | None = None) -> BatchSelection:
    """Return which rollouts train, among rollouts in groups of `n_samples`.

    `shown` are the ids of those to be counted, by default all. Their reasons still depend on the complete groups.
    """
    reasons = _reasons(costs, n_samples)
    costs = [each for each in costs if shown is None or each.rollout_id in shown]
    of_reason: defaultdict[str, list[RolloutCost]] = defaultdict(list)
    of_source: defaultdict[str, list[RolloutCost]] = defaultdict(list)
    of_step: defaultdict[int, list[RolloutCost]] = defaultdict(list)
    for each in costs:
        of_reason[reasons[each.rollout_id]].append(each)
        of_source[each.data_source].append(each)
        if each.step is not None:
            of_step[each.step].append(each)
    training = of_reason.get(TRAINS, [])
    present = [reason for reason in REASONS if reason in of_reason]
    return BatchSelection(
        len(costs),
        [
            ReasonShare(
                reason,
                len(of_reason[reason]),
                len(of_reason[reason]) / len(costs),
                [
                    _difference(measure, of_reason[reason], training if reason != TRAINS else [])
                    for measure in ("sampled tokens", "seconds", "turns", "reward")
                ],
            )
            for reason in present
        ],
        [_cost(name, some, reasons) for name, some in sorted(of_source.items())],
        [_cost(reason, of_reason[reason], reasons) for reason in present],
        [_cost(str(step), some, reasons) for step, some in sorted(of_step.items())],
    )


def _reasons(costs: Sequence[RolloutCost], n_samples: int) -> dict[str, str]:
    """Return the reason of each rollout, by its id."""
    reasons = {each.rollout_id: _own_reason(each) for each in costs}
    groups: defaultdict[int, list[RolloutCost]] = defaultdict(list)
    n_seen: defaultdict[int, int] = defaultdict(int)
    for each in costs:
        n_seen[each.group_index] += 1
        if not reasons[each.rollout_id]:
            groups[each.group_index].append(each)
    for index, members in groups.items():
        # nothing more is known of a group that is still open, or that is partly older than the newest rollouts
        is_whole = n_seen[index] == n_samples
        reason = ""
        if n_samples > 1 and is_whole and len(members) < 2:
            reason = "short group"
        elif n_samples > 1 and is_whole and len({each.reward for each in members}) == 1:
            reason = "equal rewards"
        for each in members:
            reasons[each.rollout_id] = reason or ("left out" if each.left_out else TRAINS)
    return reasons


def _own_reason(each: RolloutCost) -> str:
    """Return the reason that depends only on the rollout itself; empty if there is none."""
    if each.outcome == Outcome.STALE:
        return "stale"
    if each.state == State.CANCELLED:
        return "cancelled"
    if each.state == State.FAILED:
        return "broken"
    if not trainable(Outcome(each.outcome), each.reward):
        return "not scored"
    return "" if each.n_segments else "no rows"


def _values(measure: str, some: Sequence[RolloutCost]) -> list[float]:
    if measure == "sampled tokens":
        return [float(each.n_tokens) for each in some]
    if measure == "seconds":
        return [each.took_s for each in some]
    if measure == "turns":
        return [float(each.n_turns) for each in some]
    return [each.reward for each in some if each.reward is not None]


def _difference(measure: str, some: Sequence[RolloutCost], training: Sequence[RolloutCost]) -> RankedMeasure:
    values, others = _values(measure, some), _values(measure, training)
    median = float(np.median(values)) if values else None
    if not values or not others:
        return RankedMeasure(measure, median)
    larger, p = rank_test(values, others)
    return RankedMeasure(measure, median, larger, p)


def rank_test(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the share of pairs in which a value is larger, plus half the equal pairs, and its two-sided probability.

    The probability is that of Mann and Whitney's U by the normal approximation, with ties and continuity correction.
    """
    n, m = len(values), len(others)
    everything = np.asarray([*values, *others], dtype=np.float64)
    _, inverse, counts = np.unique(everything, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    u = float(ranks[:n].sum()) - n * (n + 1) / 2
    total = n + m
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return u / (n * m), 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return u / (n * m), math.erfc(z / math.sqrt(2))


def _cost(name: str, some: Sequence[RolloutCost], reasons: dict[str, str]) -> CostShare:
    n = len(some)
    n_trained = sum(reasons[each.rollout_id] == TRAINS for each in some)
    worked_s = sum(each.worked_s for each in some)
    return CostShare(
        name,
        n,
        n_trained,
        sum(each.waited_s for each in some) / n,
        worked_s / n,
        sum(each.called_s for each in some) / n,
        sum(each.called_tokens for each in some) / n,
        sum(each.lost_s for each in some) / worked_s if worked_s else 0.0,
        worked_s / n_trained if n_trained else None,
    )

"""The data of a batch's charts: histograms, and means over time. Templates draw them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farm.records.rollout import POLICY_OUTCOMES
from farm.records.trajectory import NO_VERSION, version_number
from farm.store.reports.ended_numbers import EndedNumbers

N_BINS = 20
_N_POINTS = 60
_POLICYS = {outcome.value for outcome in POLICY_OUTCOMES}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram: the count of values in [low, high), for the last bar in [low, high]."""

    low: float
    high: float
    n: int
    share: float
    """Its height, as a part of the highest bar."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution in bars, with its mean and median."""

    title: str
    bars: Sequence[Bar]
    n: int
    mean: float
    median: float


def histogram(title: str, values: Sequence[float]) -> Histogram | None:
    """Return the histogram of finite values; None without any. If there are few different values, each gets a bar."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    distinct = np.unique(array)
    if len(distinct) <= N_BINS // 2:
        counts = [(float(value), float(value), int((array == value).sum())) for value in distinct]
    else:
        numbers, edges = np.histogram(array, bins=N_BINS, range=(low, high))
        counts = [(float(edges[at]), float(edges[at + 1]), int(n)) for at, n in enumerate(numbers)]
    highest = max(n for _, _, n in counts)
    bars = [Bar(first, last, n, n / highest) for first, last, n in counts]
    return Histogram(title, bars, len(values), float(array.mean()), float(np.median(array)))


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """The charts of one data source of a batch."""

    data_source: str
    n: int
    mean_reward: float | None
    histograms: Sequence[Histogram]


@dataclass(frozen=True, slots=True)
class Figures:
    """The charts of the newest ended rollouts of a batch.

    `outcomes` are counts by outcome. `groups_equal` of `groups_whole` have the same reward for all samples, and so no
    gradient. `lags` are weight versions between the oldest token of a rollout and the newest weights. `times` and
    `rewards` are one line over time: seconds since the epoch, and the mean reward of the rollouts that ended then.
    """

    n: int
    sources: Sequence[SourceFigures]
    outcomes: Sequence[tuple[str, int, bool]]
    groups_whole: int
    groups_equal: int
    lags: Histogram | None
    n_stale: int
    n_restarts: int
    times: Sequence[float]
    rewards: Sequence[float]


def figures(numbers: Sequence[EndedNumbers], n_samples: int, newest_version: str = "") -> Figures:
    """Return the charts of some rollouts."""
    by_source: defaultdict[str, list[EndedNumbers]] = defaultdict(list)
    for each in numbers:
        by_source[each.data_source].append(each)
    outcomes = Counter(each.outcome for each in numbers)
    whole, equal = _groups(numbers, n_samples)
    times, rewards = _over_time(numbers)
    now = version_number(newest_version)
    lags = [float(now - each.version_min) for each in numbers if each.version_min is not None and now != NO_VERSION]
    return Figures(
        len(numbers),
        [_source(name, rows) for name, rows in sorted(by_source.items())],
        [(name, n, name in _POLICYS) for name, n in outcomes.most_common()],
        whole,
        equal,
        histogram("versions behind", [max(0.0, lag) for lag in lags]),
        outcomes.get("stale", 0),
        sum(each.n_restarts for each in numbers),
        times,
        rewards,
    )


def _source(name: str, rows: Sequence[EndedNumbers]) -> SourceFigures:
    scored = [each.reward for each in rows if each.reward is not None]
    with_turns = [each for each in rows if each.n_turns]
    made = (
        histogram("reward", scored),
        histogram("turns", [float(each.n_turns) for each in with_turns]),
        histogram("sampled tokens", [float(each.n_tokens) for each in with_turns]),
        histogram("seconds", [each.finished_at - each.submitted_at for each in rows]),
    )
    mean = sum(scored) / len(scored) if scored else None
    return SourceFigures(name, len(rows), mean, [each for each in made if each is not None])


def _groups(numbers: Sequence[EndedNumbers], n_samples: int) -> tuple[int, int]:
    """Return the number of completely scored groups, and how many of them have equal rewards."""
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for each in numbers:
        if each.reward is not None:
            rewards[each.group_index].append(each.reward)
    whole = [values for values in rewards.values() if len(values) == n_samples]
    return len(whole), sum(len(set(values)) == 1 for values in whole)


def _over_time(numbers: Sequence[EndedNumbers]) -> tuple[list[float], list[float]]:
    scored = [(each.finished_at, each.reward) for each in reversed(numbers) if each.reward is not None]
    if not scored:
        return [], []
    parts = np.array_split(np.asarray(scored, dtype=np.float64), min(_N_POINTS, len(scored)))
    return [float(part[-1, 0]) for part in parts], [float(part[:, 1].mean()) for part in parts]

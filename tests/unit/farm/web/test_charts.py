"""Figures of a batch, compared with numbers calculated by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from farm.store.reports.rollout_costs import EndedNumbers
from farm.web.batch_views import N_BINS, figures, histogram


def ended(group: int = 0, reward: float | None = 1.0, **values: Any) -> EndedNumbers:
    fields: dict[str, Any] = {
        "data_source": "math",
        "outcome": "submitted",
        "n_turns": 2,
        "n_tokens": 10,
        "submitted_at": 0.0,
        "finished_at": 5.0,
        "version_min": None,
        "version_max": None,
        "n_restarts": 0,
    }
    return EndedNumbers(group_index=group, reward=reward, **(fields | values))


def test_few_distinct_values_have_a_bar_each() -> None:
    made = histogram("reward", [0.0, 1.0, 1.0, 0.5, 1.0])
    assert made is not None
    assert [(bar.low, bar.n, bar.share) for bar in made.bars] == [(0.0, 1, 1 / 3), (0.5, 1, 1 / 3), (1.0, 3, 1.0)]
    assert (made.n, made.mean, made.median) == (5, 0.7, 1.0)
    assert histogram("reward", []) is None


@given(some.lists(some.floats(-1e9, 1e9), min_size=1, max_size=200))
def test_every_value_is_in_one_bar(values: list[float]) -> None:
    made = histogram("x", values)
    assert made is not None
    assert sum(bar.n for bar in made.bars) == len(values)
    assert len(made.bars) <= max(N_BINS, N_BINS // 2)
    assert max(bar.share for bar in made.bars) == 1.0


def test_groups_with_equal_rewards_are_counted_among_complete_groups() -> None:
    numbers = [
        *(ended(0, reward) for reward in (1.0, 1.0)),
        *(ended(1, reward) for reward in (0.0, 1.0)),
        *(ended(2, reward) for reward in (0.0, None)),
        ended(3, 0.0),
    ]
    made = figures(numbers, 2)
    assert (made.groups_whole, made.groups_equal) == (2, 1)
    assert made.sources[0].n == 7
    assert made.sources[0].mean_reward == 0.5


def test_lags_are_counted_from_the_newest_weights() -> None:
    numbers = [ended(version_min=3), ended(version_min=5), ended(version_min=None), ended(outcome="stale", reward=None)]
    made = figures(numbers, 1, "5")
    assert made.lags is not None
    assert [(bar.low, bar.n) for bar in made.lags.bars] == [(0.0, 1), (2.0, 1)]
    assert made.n_stale == 1
    assert figures(numbers, 1, "no number").lags is None


def test_rewards_over_time_are_sorted_from_old_to_new() -> None:
    # in the store's order: newest first
    numbers = [ended(reward=float(n % 2), finished_at=float(n)) for n in reversed(range(120))]
    made = figures(numbers, 1)
    assert len(made.times) == 60
    assert made.times == sorted(made.times)
    assert set(made.rewards) == {0.5}


def test_empty_batch_has_no_figures() -> None:
    made = figures([], 4)
    assert (made.n, made.sources, made.outcomes, made.groups_whole, made.lags) == (0, [], [], 0, None)

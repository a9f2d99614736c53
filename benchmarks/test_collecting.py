"""The simulated ways to collect do as documented: every finished rollout is trained, equal, or wasted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.collecting import N_GROUPS, N_SAMPLES, Totals, naive, ours, prorl
from farm.collecting import CollectingOptions


@pytest.mark.parametrize(
    ("collect", "repeats_groups"),
    [(lambda: naive(2, 1.0), False), (lambda: naive(2, 1.5), False), (lambda: prorl(2), True)],
)
def test_finished_rollouts_add_up(collect: Callable[[], Totals], repeats_groups: bool) -> None:
    totals = collect()
    assert totals.n_trained == 2 * N_GROUPS * N_SAMPLES
    wasted = totals.n_finished - totals.n_trained - totals.n_equal
    assert wasted >= 0
    # ProRL discards only rollouts that it repeats; whole batches repeat nothing
    assert (totals.n_replayed == wasted) is repeats_groups
    assert totals.run_s >= sum(map(sum, totals.trained)) + totals.equal_s - 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_inflight_groups": 24}, marks=pytest.mark.soak(only=True)),
        pytest.param({"max_staleness": 1}, marks=pytest.mark.soak(only=True)),
        {"max_staleness": 1, "leftovers": "cancel", "max_inflight_groups": 24},
    ],
    ids=["default", "over-sampled", "carried over", "kept"],
)
def test_the_farms_own_collector_adds_up_and_wastes_less_than_what_throws_away(options: dict[str, Any]) -> None:
    totals, thrown_away = ours(2, CollectingOptions(N_GROUPS, **options)), prorl(2)
    assert totals.n_trained == len(totals.trained) * N_SAMPLES == 2 * N_GROUPS * N_SAMPLES
    wasted = totals.n_finished - totals.n_trained - totals.n_equal
    assert 0 <= totals.n_replayed <= wasted < thrown_away.n_replayed
    assert max(totals.steps_behind) <= options.get("max_staleness", 0)
    assert totals.run_s >= sum(map(sum, totals.trained)) + totals.equal_s - 1e-6
    if "max_inflight_groups" not in options:
        # by default there is no bias towards short rollouts
        row = totals.row()
        assert row["seconds of a sample that trains"] > 0.95 * row["of one that was requested"]
        assert row["seconds of the slowest of a group that trains"] > 0.9 * row["of one that was requested, slowest"]

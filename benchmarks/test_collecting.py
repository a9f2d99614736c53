"""The simulated ways to collect play what they say: every finished rollout is trained, equal, or wasted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.collecting import N_GROUPS, N_SAMPLES, Totals, naive, prorl


@pytest.mark.parametrize(
    ("collect", "plays_again"),
    [(lambda: naive(2, 1.0), False), (lambda: naive(2, 1.5), False), (lambda: prorl(2), True)],
)
def test_finished_rollouts_add_up(collect: Callable[[], Totals], plays_again: bool) -> None:
    totals = collect()
    assert totals.n_trained == 2 * N_GROUPS * N_SAMPLES
    wasted = totals.n_finished - totals.n_trained - totals.n_equal
    assert wasted >= 0
    # ProRL throws nothing away but what it plays again; whole batches play nothing again
    assert (totals.n_replayed == wasted) is plays_again
    assert totals.played_s >= totals.trained_s + totals.equal_s - 1e-6

"""Rollouts that train, those that do not, and why; and the test that compares the two."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as some

from farm.store.reports.rollout_costs import RolloutCost
from farm.web.selection import REASONS, TRAINS, rank_test, selection

RIGHT = RolloutCost("b.0.0", 0, "math", "completed", "answered", 1.0, 2, 100, 1, 10.0, 1.0, 8.0, 0.0, 6.0, 100)


def group(index: int, *members: Mapping[str, object]) -> list[RolloutCost]:
    return [replace(RIGHT, rollout_id=f"b.{index}.{at}", group_index=index, **each) for at, each in enumerate(members)]  # type: ignore[arg-type]


def test_each_rollout_has_the_first_reason_that_applies() -> None:
    wrong = {"reward": 0.0, "n_tokens": 400}
    broken = {"state": "failed", "outcome": "lost", "reward": None, "lost_s": 4.0, "data_source": "code"}
    stale = {"state": "completed", "outcome": "stale", "reward": None}
    cancelled = {"state": "cancelled", "outcome": "cancelled", "reward": None}
    costs = [
        *group(0, {}, wrong),
        *group(1, {}, {}),
        *group(2, {}, broken),
        *group(3, stale, cancelled),
        *group(4, {"reward": None}, {"n_segments": 0}),
        *group(5, {"left_out": True}, wrong),
        *group(6, {}),
    ]
    made = selection(costs, 2)
    found = {each.reason: each.n for each in made.reasons}
    assert found == {
        **{TRAINS: 4, "broken": 1, "cancelled": 1, "stale": 1, "not scored": 1, "no rows": 1, "short group": 1},
        **{"equal rewards": 2, "left out": 1},
    }
    assert list(found) == [reason for reason in REASONS if reason in found]
    assert made.n == 13
    assert sum(each.share for each in made.reasons) == pytest.approx(1.0)
    code, math = made.by_source
    assert (code.name, code.n, code.n_trained, code.lost_share, code.per_trained_s) == ("code", 1, 0, 0.5, None)
    assert (math.n, math.n_trained, math.worked_s, math.per_trained_s) == (12, 4, 8.0, 24.0)
    assert math.called_tokens == 100
    trains = made.by_reason[0]
    assert (trains.name, trains.n, trains.waited_s, trains.called_s) == (TRAINS, 4, 1.0, 6.0)


def test_reasons_of_a_part_are_those_of_its_complete_groups() -> None:
    broken = {"state": "failed", "outcome": "lost", "reward": None}
    costs = [*group(0, {}, {"reward": 0.0}), *group(1, {}, broken)]
    made = selection(costs, 2, {"b.0.0", "b.1.0"})
    assert {each.reason: each.n for each in made.reasons} == {TRAINS: 1, "short group": 1}
    assert (made.n, made.by_source[0].n) == (2, 2)
    assert selection(costs, 2, ()).reasons == []


def test_costs_are_split_by_the_trainers_steps() -> None:
    costs = [
        *group(0, {"step": 4}, {"reward": 0.0, "step": 4}),
        *group(1, {"step": 10}, {"left_out": True, "step": 10}),
    ]
    costs += group(2, {}, {})
    assert [(each.name, each.n, each.n_trained) for each in selection(costs, 2).by_step] == [("4", 2, 2), ("10", 2, 0)]
    assert selection(group(0, {}), 1).by_step == []


def test_single_samples_need_no_group_and_an_empty_batch_is_empty() -> None:
    assert [each.reason for each in selection(group(0, {}) + group(1, {}), 1).reasons] == [TRAINS]
    assert selection([], 4).reasons == []


def test_untrained_rollouts_are_compared_with_trained_ones() -> None:
    costs = [row for index in range(30) for row in group(index, {}, {"reward": 0.0, "n_tokens": 90 + index})]
    late = {"state": "completed", "outcome": "stale", "reward": None, "n_tokens": 5000}
    costs += [row for index in range(30, 60) for row in group(index, late)]
    trains, stale = selection(costs, 2).reasons
    assert [(each.measure, each.larger, each.p) for each in trains.differences] == [
        (measure, None, None) for measure in ("sampled tokens", "seconds", "turns", "reward")
    ]
    tokens, seconds, _, reward = stale.differences
    assert (tokens.median, tokens.larger) == (5000, 1.0)
    assert tokens.p is not None
    assert tokens.p < 1e-9
    assert (seconds.larger, seconds.p) == (0.5, 1.0)
    assert (reward.median, reward.larger) == (None, None)


@given(
    some.lists(some.integers(0, 5).map(float), min_size=1, max_size=12),
    some.lists(some.integers(0, 5).map(float), min_size=1, max_size=12),
)
def test_share_is_that_of_all_pairs_and_the_test_is_symmetric(values: list[float], others: list[float]) -> None:
    larger, p = rank_test(values, others)
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in values for b in others]
    assert larger == pytest.approx(fmean(pairs))
    assert 0.0 <= p <= 1.0
    smaller, same = rank_test(others, values)
    assert smaller == pytest.approx(1 - larger)
    assert same == pytest.approx(p)


@pytest.mark.parametrize("shift", [0.0, 0.6, 1.2])
def test_p_value_is_close_to_that_of_permutations(shift: float) -> None:
    drawn = random.Random(7)
    values = [round(drawn.gauss(shift, 1), 1) for _ in range(25)]
    others = [round(drawn.gauss(0, 1), 1) for _ in range(30)]
    larger, p = rank_test(values, others)
    everything, n_as_far = [*values, *others], 0
    for _ in range(2000):
        drawn.shuffle(everything)
        n_as_far += abs(rank_test(everything[:25], everything[25:])[0] - 0.5) >= abs(larger - 0.5) - 1e-12
    assert p == pytest.approx(n_as_far / 2000, abs=0.04)

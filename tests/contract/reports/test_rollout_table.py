"""Filtered rollouts in pages, on every kind of database: equal to the result of a filter in Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest

from farm.errors import InvalidRequest
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout, State
from farm.store import batches
from farm.store.database import Store
from farm.store.reports import rollout_table
from farm.store.reports.rollout_costs import last_ends, live_by_node, newest_ended
from farm.store.reports.rollout_table import RolloutFilter
from farm.store.rollouts import rollouts
from tests.secret_keys import key_of

N_GROUPS, N_SAMPLES = 12, 5
OURS = {Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.LOST}


@pytest.fixture
def batch_id(store: Store) -> str:
    """Return a batch of rollouts in every state, with numbers that often tie."""
    source = random.Random(7)
    instances = tuple(Instance(data_source=("math", "code")[n % 2], fields={}) for n in range(N_GROUPS))
    request = BatchRequest(instances=instances, n_samples=N_SAMPLES)
    made: str = store.write(lambda connection: batches.create(connection, request, "", key_of(store)))[0]
    ids = [each.rollout_id for each in store.read(lambda connection: batches.rollouts_of(connection, made))]
    source.shuffle(ids)

    def fill(connection: Any) -> None:
        for number, rollout_id in enumerate(ids):
            statement = rollouts.update().where(rollouts.c.rollout_id == rollout_id)
            connection.execute(statement.values(**_values(source, number)))

    store.write(fill)
    return made


def _values(source: random.Random, number: int) -> dict[str, Any]:
    live = number % 4 == 0
    if live:
        state = source.choice(["queued", "active"])
        return {"state": state, "node": f"n{number % 3}", "stage": source.choice(["init", "run"])}
    outcome = source.choice([Outcome.SUBMITTED, Outcome.MAX_TURNS, Outcome.CANCELLED, *sorted(OURS)])
    ours, scored = outcome in OURS, outcome in POLICY_OUTCOMES
    return {
        "state": "failed" if ours else "completed" if scored else "cancelled",
        "outcome": outcome.value,
        "reward": source.choice([0.0, 0.5, 1.0]) if scored else None,
        "failure_kind": outcome.value if ours else None,
        "failure_message": f"it broke %{number % 2}_\nmore" if ours else None,
        "node": f"n{number % 3}",
        "n_turns": source.randrange(4),
        "n_response_tokens": source.choice([10, 20, 30]),
        "submitted_at": 1000.0,
        "finished_at": 1000.0 + source.randrange(5),
        "finish_seq": number + 1,
        "version_min": source.choice([None, 1, 2]),
        "version_max": 3,
    }


def seconds(rollout: Rollout) -> float:
    assert rollout.finished_at is not None
    return rollout.finished_at - rollout.submitted_at


Holds = Callable[[Rollout], bool]
CASES: list[tuple[dict[str, Any], Holds]] = [
    ({}, lambda each: True),
    ({"state": "failed"}, lambda each: each.state is State.FAILED),
    ({"state": "queued"}, lambda each: each.state is State.QUEUED),
    ({"state": "active", "node": "n0"}, lambda each: each.state is State.ACTIVE and each.node == "n0"),
    ({"outcome": "max_turns"}, lambda each: each.outcome is Outcome.MAX_TURNS),
    ({"ours": True}, lambda each: each.outcome in OURS),
    ({"ours": False}, lambda each: each.outcome in POLICY_OUTCOMES),
    ({"failure": "lost"}, lambda each: each.failure is not None and each.failure.kind == "lost"),
    ({"message": "%1_"}, lambda each: each.failure is not None and "%1_" in each.failure.message),
    ({"message": "it_broke"}, lambda each: False),
    ({"data_source": "code", "min_turns": 2}, lambda each: each.data_source == "code" and each.n_turns >= 2),
    ({"group": 3}, lambda each: each.group_index == 3),
    ({"version": 1}, lambda each: each.version_min is not None and each.version_min <= 1),
    ({"min_reward": 0.5}, lambda each: each.reward is not None and each.reward >= 0.5),
    ({"max_reward": 0}, lambda each: each.reward == 0),
    ({"min_tokens": 20, "max_tokens": 20}, lambda each: each.n_response_tokens == 20),
    ({"min_seconds": 1, "max_seconds": 2}, lambda each: 1 <= seconds(each) <= 2),
    ({"finished_after": 1003}, lambda each: each.finished_at is not None and each.finished_at >= 1003),
    ({"engine": "http://nowhere/v1"}, lambda each: False),
]


def pages(store: Store, batch_id: str, wanted: RolloutFilter, limit: int) -> list[Rollout]:
    result: list[Rollout] = []
    after = ""
    while True:
        page = store.read(partial(rollout_table.page, batch_id=batch_id, wanted=wanted, after=after, limit=limit))
        assert len(page.rollouts) <= limit
        result += page.rollouts
        after = page.after
        if not after:
            return result


def test_pages_contain_each_matching_rollout_once(store: Store, batch_id: str) -> None:
    everything = store.read(lambda connection: batches.rollouts_of(connection, batch_id))
    for values, holds in CASES:
        wanted = RolloutFilter.model_validate(values)
        live = wanted.is_of_live
        expected = {each.rollout_id for each in everything if (each.finish_seq is None) == live and holds(each)}
        for limit in (1, 7, 100):
            result = [each.rollout_id for each in pages(store, batch_id, wanted, limit)]
            assert len(result) == len(set(result)), (values, limit)
            assert set(result) == expected, (values, limit)


@pytest.mark.parametrize("ascending", [True, False])
def test_pages_are_ordered_despite_ties(store: Store, batch_id: str, ascending: bool) -> None:
    keys: dict[str, Callable[[Rollout], float]] = {
        "newest": lambda each: each.cursor,
        "reward": lambda each: -1.0 if each.reward is None else each.reward,
        "tokens": lambda each: each.n_response_tokens,
        "turns": lambda each: each.n_turns,
        "seconds": seconds,
    }
    for order, key in keys.items():
        wanted = RolloutFilter.model_validate({"order": order, "ascending": ascending})
        result = pages(store, batch_id, wanted, 7)
        values = [(key(each), each.rollout_id) for each in result]
        assert values == sorted(values, reverse=not ascending), order


def test_rollouts_that_end_between_pages_shift_nothing(store: Store, batch_id: str) -> None:
    wanted = RolloutFilter()
    first = store.read(lambda connection: rollout_table.page(connection, batch_id, wanted, "", 10))
    live = pages(store, batch_id, RolloutFilter(state=State.QUEUED), 100)[0]
    ended = rollouts.update().where(rollouts.c.rollout_id == live.rollout_id)
    values = {"state": "cancelled", "outcome": "cancelled", "finish_seq": 10_000, "finished_at": 2000.0}
    store.write(lambda connection: connection.execute(ended.values(**values)) and None)
    second = store.read(lambda connection: rollout_table.page(connection, batch_id, wanted, first.after, 10))
    assert first.rollouts[-1].cursor > second.rollouts[0].cursor
    assert live.rollout_id not in {each.rollout_id for each in second.rollouts}


@pytest.mark.parametrize(
    "after", ["x", "[1]", '["a", "b"]', "[NaN, 1]", "[true, 1]", "[1e400, 1]", '{"a": 1}', "[1, []]"]
)
def test_unknown_cursor_is_refused(store: Store, batch_id: str, after: str) -> None:
    with pytest.raises(InvalidRequest, match="no cursor"):
        store.read(lambda connection: rollout_table.page(connection, batch_id, RolloutFilter(), after, 10))
    live = RolloutFilter(state=State.QUEUED)
    with pytest.raises(InvalidRequest, match="no cursor"):
        store.read(lambda connection: rollout_table.page(connection, batch_id, live, after, 10))


@pytest.mark.parametrize("order", ["newest", "reward", "tokens", "turns", "seconds"])
def test_invalid_cursor_is_refused_by_every_database(store: Store, batch_id: str, order: str) -> None:
    values = ["1", "1.5", "-1", "9007199254740992", "1e400", "1" + 30 * "0", "true", '"a"', "null", "[1]"]
    places = [f'"{batch_id}.0.0"', "5", "1" + 30 * "0", '"x"', '"\\u0000"', '"\\ud800"', "true", "null", "[]"]
    for state in (None, State.QUEUED):
        wanted = RolloutFilter.model_validate({"order": order, "state": state})
        for value, place in product(values, places):
            page = partial(rollout_table.page, batch_id=batch_id, wanted=wanted, after=f"[{value}, {place}]")
            with suppress(InvalidRequest):
                store.read(page)


def test_huge_reward_is_a_valid_cursor(store: Store, batch_id: str) -> None:
    huge = rollouts.update().where(rollouts.c.reward.is_not(None)).values(reward=1e300)
    store.write(lambda connection: connection.execute(huge))
    wanted = RolloutFilter(order="reward")
    first = store.read(partial(rollout_table.page, batch_id=batch_id, wanted=wanted, limit=2))
    second = store.read(partial(rollout_table.page, batch_id=batch_id, wanted=wanted, after=first.after, limit=2))
    assert len({each.rollout_id for each in (*first.rollouts, *second.rollouts)}) == 4


def test_failures_are_grouped_by_kind_and_first_line(store: Store, batch_id: str) -> None:
    everything = store.read(lambda connection: batches.rollouts_of(connection, batch_id))
    failed = [each for each in everything if each.failure is not None]
    groups = store.read(lambda connection: rollout_table.failure_groups(connection, batch_id))
    assert sum(group.n for group in groups) == len(failed)
    assert [group.n for group in groups] == sorted((group.n for group in groups), reverse=True)
    for group in groups:
        alike = [
            each
            for each in failed
            if each.failure is not None
            and (each.failure.kind, each.failure.message.split("\n")[0]) == (group.kind, group.first_line)
        ]
        assert group.n == len(alike)
        assert set(group.nodes) == {each.node for each in alike}
        assert group.example == max(alike, key=lambda each: each.cursor).rollout_id
    wanted = RolloutFilter(node="n1", failure=Outcome.LOST)
    met = store.read(partial(rollout_table.failure_groups, batch_id=batch_id, wanted=wanted))
    of_node = [each for each in failed if each.node == "n1" and each.failure and each.failure.kind == "lost"]
    assert sum(group.n for group in met) == len(of_node) > 0
    assert {group.kind for group in met} == {"lost"}


def test_statistics_cover_the_newest_ended_rollouts(store: Store, batch_id: str) -> None:
    everything = store.read(lambda connection: batches.rollouts_of(connection, batch_id))
    ended = sorted((each for each in everything if each.cursor), key=lambda each: -each.cursor)
    numbers = store.read(lambda connection: newest_ended(connection, batch_id, 9))
    assert [(each.group_index, each.reward, each.n_tokens) for each in numbers] == [
        (each.group_index, each.reward, each.n_response_tokens) for each in ended[:9]
    ]
    assert list(store.read(lambda connection: last_ends(connection, batch_id, 4))) == [
        each.finished_at for each in ended[:4]
    ]
    wanted = RolloutFilter(data_source="code", min_turns=2)
    met = store.read(partial(newest_ended, batch_id=batch_id, limit=3, wanted=wanted))
    assert [(each.reward, each.n_tokens) for each in met] == [
        (each.reward, each.n_response_tokens) for each in ended if each.data_source == "code" and each.n_turns >= 2
    ][:3]
    assert len(met) == 3
    live = store.read(live_by_node)
    assert sum(n for *_, n in live) == sum(each.finish_seq is None and each.node is not None for each in everything)

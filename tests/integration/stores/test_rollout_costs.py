"""Costs of rollouts, on every kind of database: of all attempts, and after pruning."""

from __future__ import annotations

from functools import partial

from sqlalchemy import insert

from farm.store.database import Store
from farm.store.reports.rollout_costs import newest_costs, newest_meeting
from farm.store.reports.rollout_table import RolloutFilter
from farm.store.rollouts import attempts
from tests.contract.retention.test_pruning import change, ended_batch, farm_of, pruned


def test_costs_sum_all_attempts_and_survive_pruning(store: Store) -> None:
    batch_id = ended_batch(store, n=3)
    first, second, third = (f"{batch_id}.{group}.0" for group in range(3))
    change(store, attempts, attempts.c.rollout_id == first, queued_at=100.0, started_at=102.0, finished_at=107.0)
    lost = {"attempt": 0, "stage": "run", "node": "n", "worker": "w", "queued_at": 10.0, "started_at": 11.0}
    store.write(
        lambda connection: connection.execute(
            insert(attempts).values(rollout_id=first, finished_at=31.0, result="lost", **lost)
        )
    )
    farm = farm_of(store)
    farm.annotate("run", 1, [{"rollout_id": second, "name": "trained", "value": 0}])
    farm.annotate("run", 1, [{"rollout_id": third, "name": "trained", "value": 0}])
    farm.annotate("run", 2, [{"rollout_id": third, "name": "trained", "value": 1}])
    costs = {each.rollout_id: each for each in store.read(partial(newest_costs, batch_id=batch_id))}
    assert list(costs) == [third, second, first]
    one = costs[first]
    assert (one.waited_s, one.worked_s, one.lost_s) == (3 * 2.0 + 1.0, 3 * 5.0 + 20.0, 20.0)
    assert (one.reward, one.outcome, one.n_segments) == (0.5, "submitted", 1)
    assert one.called_tokens == 2
    assert [costs[id].left_out for id in (first, second, third)] == [False, True, False]
    assert [costs[id].step for id in (first, second, third)] == [None, 1, 2]
    assert len(store.read(partial(newest_costs, batch_id=batch_id, limit=1))) == 1
    met = partial(newest_meeting, batch_id=batch_id, wanted=RolloutFilter(group=1))
    assert store.read(met) == {second}
    for step, expected in {1: {second, third}, 2: {third}, 3: set()}.items():
        of_step = partial(newest_meeting, batch_id=batch_id, wanted=RolloutFilter(step=step))
        assert store.read(of_step) == expected
    assert store.read(partial(met, limit=1)) == frozenset(), "only the newest are looked at"
    assert pruned(store) == [batch_id]
    kept = store.read(partial(newest_costs, batch_id=batch_id))
    assert {(each.reward, each.worked_s, each.called_s) for each in kept} == {(0.5, 0.0, 0.0)}
    assert store.read(partial(newest_costs, batch_id="b0123456789")) == []

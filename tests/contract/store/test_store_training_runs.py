"""Training runs in the store: batches by key, one record for each step, solve rates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event

from farm.client.local import LocalRuns
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.records.request import BatchRequest, Instance
from farm.records.training_run import SolveRate, check_own_key
from farm.store import batches
from farm.store.database import Store
from testkit.scripted_rollouts import ScriptedRollouts
from tests.secret_keys import key_of


def submit(store: Store, key: str, *names: str, run: str = "r", source: str = "math", **values: Any) -> str:
    instances = tuple(Instance(data_source=source, instance_id=name, fields={}) for name in names)
    request = BatchRequest(instances=instances, idempotency_key=key, run=run, **values)
    return store.write(lambda connection: batches.create(connection, request, "", key_of(store)))[0]


def test_batches_are_found_by_their_keys(store: Store) -> None:
    runs = LocalRuns(store)
    first = submit(store, "k1", "a", "b", n_samples=3, metadata={"mine": {"step": 4}})
    second = submit(store, "k2", "a")
    ScriptedRollouts(store, lambda rollout: 1.0, ["math"]).run_next(2)
    found = runs.keyed_batches(["k2", "k0", "k1", "k2"])
    assert [each.batch_id for each in found] == [second, first]
    assert (found[1].n_rollouts, found[1].n_samples, found[1].cursor) == (6, 3, 2)
    assert (found[1].metadata, found[0].cursor) == ({"mine": {"step": 4}}, 0)
    assert runs.keyed_batches([]) == []


def test_instances_of_groups_are_read_back(store: Store) -> None:
    runs = LocalRuns(store)
    given = [
        Instance(data_source="math", instance_id="a", fields={"question": "6 * 7", "gold": ["42", None]}),
        Instance(data_source="code", instance_id="b", fields={}, engine_url="http://own/v1", engine_key="env:OWN_KEY"),
        Instance(data_source="math", instance_id="c", fields={}, engine_url="http://own/v1", engine_model="m"),
    ]
    request = BatchRequest(instances=tuple(given), n_samples=2)
    batch_id = store.write(lambda connection: batches.create(connection, request, "", key_of(store)))[0]
    assert runs.instances([f"{batch_id}.{index}" for index in (2, 0, 1, 0)]) == [given[2], given[0], given[1], given[0]]
    assert runs.instances([]) == []
    for unknown in (f"{batch_id}.3", f"{batch_id}", "b0000000000.0"):
        with pytest.raises(NotFound):
            runs.instances([unknown])


@pytest.mark.parametrize(("key", "is_known"), [("", True), ("none", True), ("env:MY_KEY", True), ("k-123456", False)])
def test_literal_key_of_an_instance_is_refused_and_not_shown(key: str, is_known: bool) -> None:
    if is_known:
        check_own_key("a", key)
        return
    with pytest.raises(InvalidRequest, match="never shown") as error:
        check_own_key("a", key)
    assert "k-123456" not in str(error.value)


def test_step_is_recorded_once(store: Store) -> None:
    runs = LocalRuns(store)
    assert runs.recorded_step("r") is None
    assert runs.record_step("r", 3, {"groups": ["b.0"]}).record == {"groups": ["b.0"]}
    assert runs.record_step("r", 3, {"groups": ["b.1"]}).record == {"groups": ["b.0"]}
    runs.record_step("r", 5, {"groups": []})
    runs.record_step("other", 9, {})
    with pytest.raises(Conflict, match="step 5"):
        # the record of 5 continues that of 3
        runs.record_step("r", 4, {"groups": ["b.0"]})
    newest = [runs.recorded_step("r", up_to) for up_to in (None, 5, 4, 3, 2)]
    assert [each and each.step for each in newest] == [5, 5, 3, 3, None]


def test_concurrent_records_of_a_step_give_one_record(store: Store) -> None:
    stores = [Store(store.engine.url.render_as_string(hide_password=False)) for _ in range(4)]
    try:
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda n: LocalRuns(stores[n]).record_step("r", 1, {"by": n}).record, range(4)))
    finally:
        for each in stores:
            each.close()
    assert len({record["by"] for record in written}) == 1


@pytest.mark.parametrize(
    ("run", "record", "field"), [("a run", {}, "run"), ("", {}, "run"), ("r", {"x": float("nan")}, "record")]
)
def test_invalid_record_is_refused_by_its_field(store: Store, run: str, record: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        LocalRuns(store).record_step(run, 1, record)
    assert error.value.field == field


def rates_by_hand(store: Store) -> None:
    """Write two waves of a run under weights 1 and 2, another run, another source, a broken and a queued rollout."""
    rewards: dict[str, float | None] = {"a": 1.0, "b": 0.0, "c": 0.5, "broken": None}
    scripted = ScriptedRollouts(store, lambda rollout: rewards[rollout.instance_id], ["math"], version=1)
    submit(store, "1", "a", "b", "broken", n_samples=2)
    submit(store, "2", "a", run="other")
    submit(store, "3", "a", source="code")
    scripted.run_next()
    rewards["a"], scripted.version = 0.0, 2
    submit(store, "4", "a", "c", n_samples=1)
    scripted.run_next()
    submit(store, "5", "b", n_samples=4)


def test_solve_rates_count_scored_rollouts_of_the_run(store: Store) -> None:
    rates_by_hand(store)
    runs = LocalRuns(store)
    a, b, c = SolveRate("a", 3, 2, 2 / 3), SolveRate("b", 2, 0, 0.0), SolveRate("c", 1, 0, 0.5)
    assert runs.solve_rates("r", "math") == [a, b, c]
    assert runs.solve_rates("r", "math", ["c", "a", "nobody", "a"]) == [a, c]
    assert runs.solve_rates("r", "math", []) == []
    assert runs.solve_rates("r", "math", min_version=2) == [SolveRate("a", 1, 0, 0.0), c]
    assert runs.solve_rates("r", "math", ["c"], solved_at=0.5) == [SolveRate("c", 1, 1, 0.5)]
    assert runs.solve_rates("r", "code") == [SolveRate("a", 1, 1, 1.0)]
    assert a.rate == pytest.approx(2 / 3)


def test_non_numeric_versions_are_in_no_window(store: Store) -> None:
    submit(store, "1", "a")
    ScriptedRollouts(store, lambda rollout: 1.0, ["math"]).run_next()
    runs = LocalRuns(store)
    assert runs.solve_rates("r", "math") == [SolveRate("a", 1, 1, 1.0)]
    assert runs.solve_rates("r", "math", min_version=0) == []


def test_solve_rates_of_instances_use_an_index(sqlite_store: Store) -> None:
    queries: list[tuple[str, Any]] = []

    @event.listens_for(sqlite_store.engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        queries.append((statement, parameters))

    LocalRuns(sqlite_store).solve_rates("r", "math", ["a", "b"])
    statement, parameters = next(each for each in queries if "avg(" in each[0])
    plan = sqlite_store.read(
        lambda connection: connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    )
    assert "USING INDEX ix_rollouts_scored (data_source=? AND instance_id=?)" in str(plan)

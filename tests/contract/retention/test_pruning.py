"""Pruning of old batches, on every kind of database: what is pruned, what never is, and that it may be killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Table, func, insert, literal, select, update

from farm.cli.batches import show
from farm.cli.upkeep.stored_data import prune
from farm.client.http_errors import error_of, problem_of
from farm.client.local import LocalFarm
from farm.errors import FarmError, NotFound, Pruned
from farm.ids import RolloutRef
from farm.notifications import Signals
from farm.records.experts.expert_stretches import stretches_of
from farm.records.experts.routed_experts import CallExperts
from farm.records.rollout import Stage
from farm.records.trajectory import Segment, token_ids
from farm.scheduler.background_work import RetentionKeeper
from farm.settings import Settings
from farm.store import cancel_and_rescore, consumers, trajectories
from farm.store.blobs import artefacts
from farm.store.blobs.artefacts import artefacts as artefact_rows
from farm.store.blobs.stored_experts import call_experts
from farm.store.consumers import deliveries, steps
from farm.store.database import Store
from farm.store.nodes import nodes
from farm.store.reports import keyed_rollouts
from farm.store.retention.kept import RetentionLevel
from farm.store.retention.pruning import Pruner, pin
from farm.store.rollouts import attempts, batches, instances, rewards, rollouts
from farm.store.sql.clock import db_now
from farm.store.trajectories import CallLog, model_calls, record_call, segment_rows, store_segments
from tests.contract.store.test_store import advance, announce, claimed, finish, new_batch, place
from tests.services.commands import output_of
from tests.services.model_calls import model_call

DAY_S = 86_400.0
OLD_S = 20 * DAY_S
TABLES = (
    *(rollouts, attempts, rewards, model_calls, call_experts, segment_rows, artefact_rows),
    *(instances, deliveries, batches),
)


def ended_batch(store: Store, n: int = 2, n_samples: int = 1, age_s: float = OLD_S, **values: Any) -> str:
    """Return a batch that ended so long ago, with calls, rows, an artefact and an archive."""
    batch_id = new_batch(store, n, n_samples, **values)
    place(store, batch_id)
    for group in range(n):
        for sample in range(n_samples):
            _run_rollout(store, f"{batch_id}.{group}.{sample}", batch_id)
    change(store, instances, instances.c.batch_id == batch_id, archive="a" * 64)
    age(store, batch_id, age_s)
    return batch_id


def _run_rollout(store: Store, rollout_id: str, batch_id: str) -> None:
    assert advance(store, claimed(store, rollout_id, Stage.INIT))
    held = claimed(store, rollout_id, Stage.RUN)
    prompt, response = token_ids([1, 2]), token_ids([3])
    segment = Segment(prompt, response, np.ones(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.int32), None)
    experts = CallExperts.of(0, np.ones((2, 1, 1), np.uint8))
    call = model_call(prompt_ids=prompt, response_ids=response, routed_experts=experts)

    def record(connection: Connection) -> None:
        for attempt in (0, 1):
            record_call(connection, CallLog(rollout_id, attempt).row(call), experts)
        artefacts.keep(connection, held, "out", "text/plain", 3, artefacts.packed(b"abc"))
        store_segments(connection, rollout_id, batch_id, 1, [segment], [stretches_of(segment, [call])])

    store.write(record)
    ended = {"policy_outcome": "submitted", "submission": {"answer": "42"}}
    assert advance(store, held, n_segments=1, **ended)
    assert finish(store, claimed(store, rollout_id, Stage.EVAL), 0.5)


def change(store: Store, table: Table, where: Any, **values: Any) -> None:
    store.write(lambda connection: connection.execute(update(table).where(where).values(**values)))


def age(store: Store, batch_id: str, age_s: float) -> None:
    at = db_now() - age_s
    change(store, batches, batches.c.batch_id == batch_id, created_at=at)
    ended = (rollouts.c.batch_id == batch_id) & rollouts.c.finish_seq.is_not(None)
    change(store, rollouts, ended, finished_at=at)


def rows(store: Store, batch_id: str) -> dict[str, int]:
    """Return the number of a batch's rows by table."""

    def count(connection: Connection, table: Table) -> int:
        by_batch = "batch_id" in table.c
        mine = table.c.batch_id == batch_id if by_batch else table.c.rollout_id.startswith(f"{batch_id}.")
        return int(connection.execute(select(func.count(literal(1))).where(mine)).scalar_one())

    return {table.name: store.read(lambda connection: count(connection, table)) for table in TABLES}  # noqa: B023


def pruned(
    store: Store, kept: RetentionLevel = RetentionLevel.REWARDS, older_s: float = 14 * DAY_S, **options: Any
) -> list[str]:
    return [each.batch_id for each in Pruner(store, pause=0.0, **options).prune(older_s, kept)]


def farm_of(store: Store) -> LocalFarm:
    return LocalFarm(store, Signals(""), 1000)


LOOKUPS: dict[str, Callable[[LocalFarm, str], Any]] = {
    "calls": lambda farm, id: farm.calls(f"{id}.0.0"),
    "timings": lambda farm, id: farm.timings(f"{id}.0.0"),
    "artefacts": lambda farm, id: farm.artefacts(f"{id}.0.0"),
    "artefact": lambda farm, id: farm.artefact(f"{id}.0.0", "out"),
    "collect": lambda farm, id: farm.collect(id),
    "page": lambda farm, id: farm.page(id, 0),
    "groups": lambda farm, id: farm.page(id, 0, whole_groups=True),
    "stream": lambda farm, id: list(farm.stream(id)),
    "rescore": lambda farm, id: farm.rescore(id),
    "rows": lambda farm, id: farm.rows(id),
}


def test_rewards_and_counts_survive_pruning_and_removed_data_is_named(store: Store) -> None:
    batch_id, young = ended_batch(store), ended_batch(store, age_s=13 * DAY_S)
    farm, before = farm_of(store), rows(store, young)
    known = [farm.rollout(each.rollout_id) for each in farm.rollouts(batch_id)]
    status, scores = farm.status(batch_id), farm.rewards(f"{batch_id}.1.0")
    assert pruned(store) == [batch_id]
    assert rows(store, young) == before
    left = {"rollouts": 2, "rewards": 2, "instances": 2, "batches": 1}
    assert rows(store, batch_id) == dict.fromkeys(before, 0) | left
    assert (farm.rollouts(batch_id), farm.status(batch_id), farm.rewards(f"{batch_id}.1.0")) == (known, status, scores)
    assert farm.violations(batch_id) == []
    assert not farm.conservation(batch_id).off
    for name, ask in LOOKUPS.items():
        with pytest.raises(Pruned, match=f"batch {batch_id} was pruned") as caught:
            ask(farm, batch_id)
        again = error_of(problem_of(caught.value).body())
        assert isinstance(again, Pruned), name
        assert problem_of(caught.value).status == 410
        if name != "rescore":
            assert ask(farm, young) is not None
    contents = select(instances.c.fields, instances.c.archive).where(instances.c.batch_id == batch_id)
    emptied = store.read(lambda connection: connection.execute(contents).all())
    assert [tuple(each) for each in emptied] == [({}, "")] * 2
    assert pruned(store) == [], "it is done"


def test_trajectories_level_keeps_only_training_data(store: Store) -> None:
    batch_id = ended_batch(store)
    farm, before = farm_of(store), rows(store, batch_id)
    known = farm.collect(batch_id)
    assert pruned(store, RetentionLevel.TRAJECTORIES) == [batch_id]
    halved = {name: before[name] // 2 for name in ("model_calls", "call_experts")}
    assert rows(store, batch_id) == before | {"artefacts": 0} | halved
    again = farm.collect(batch_id)
    assert [row.routed_experts.known.tolist() for each in again for row in each.segments if row.routed_experts] == (
        [[1, 1, 0]] * len(again)
    )
    assert [each.rollout_id for each in again] == [each.rollout_id for each in known]
    assert all(each.segments for each in again)
    assert farm.violations(batch_id) == []
    for name in ("artefacts", "artefact"):
        with pytest.raises(Pruned, match="its trajectories are kept, its artefacts are gone"):
            LOOKUPS[name](farm, batch_id)
    assert pruned(store, RetentionLevel.TRAJECTORIES) == []
    assert pruned(store, RetentionLevel.REWARDS) == [batch_id], "less may be kept later"
    assert pruned(store, RetentionLevel.TRAJECTORIES) == [], "and no more again"


def test_nothing_level_removes_the_whole_batch(store: Store) -> None:
    batch_id, other = ended_batch(store, idempotency_key="mine"), ended_batch(store, age_s=0.0)
    before = rows(store, other)
    assert pruned(store, RetentionLevel.NOTHING) == [batch_id]
    assert set(rows(store, batch_id).values()) == {0}
    assert rows(store, other) == before
    with pytest.raises(NotFound, match="there is no batch"):
        farm_of(store).status(batch_id)


def _open(store: Store, batch_id: str) -> None:
    row = rollouts.c.rollout_id == f"{batch_id}.1.0"
    values = {"state": "queued", "finish_seq": None, "finished_at": None, "outcome": None, "reward": None}
    store.write(lambda connection: connection.execute(update(rollouts).where(row).values(**values)))


def _pinned(store: Store, batch_id: str) -> None:
    store.write(lambda connection: pin(connection, batch_id, True))


def _consumed(store: Store, batch_id: str) -> None:
    store.write(lambda connection: consumers.acknowledge(connection, batch_id, "trainer", 1))


def _of_run(store: Store, batch_id: str) -> None:
    change(store, batches, batches.c.batch_id == batch_id, run="r1")


def _of_a_run_that_records(store: Store, batch_id: str) -> None:
    _of_run(store, batch_id)
    store.write(lambda connection: consumers.record_step(connection, "r1", 7, {}))


def _of_a_run_that_submits(store: Store, batch_id: str) -> None:
    _of_run(store, batch_id)
    new_batch(store, run="r1")


def _rescored(store: Store, batch_id: str) -> None:
    store.write(lambda connection: cancel_and_rescore.rescore(connection, RolloutRef.of(f"{batch_id}.0.0")))


@pytest.mark.parametrize("held", [_open, _pinned, _consumed, _of_a_run_that_records, _of_a_run_that_submits, _rescored])
def test_batch_in_use_is_not_pruned(store: Store, held: Callable[[Store, str], None]) -> None:
    batch_id = ended_batch(store)
    held(store, batch_id)
    before = rows(store, batch_id)
    for kept in RetentionLevel:
        assert pruned(store, kept) == []
    assert rows(store, batch_id) == before


def test_ended_run_and_consumer_hold_no_batch(store: Store) -> None:
    batch_id = ended_batch(store)
    _of_a_run_that_records(store, batch_id)
    _consumed(store, batch_id)
    store.write(lambda connection: consumers.record_step(connection, "r1", 8, {}))

    change(store, steps, steps.c.run == "r1", created_at=db_now() - OLD_S)
    change(store, deliveries, deliveries.c.batch_id == batch_id, acknowledged_at=db_now() - OLD_S)
    assert pruned(store) == [batch_id]
    assert Pruner(store, pause=0.0).forget(14 * DAY_S) == 1, "its older step"
    assert store.read(lambda connection: consumers.recorded_step(connection, "r1")).step == 8  # type: ignore[union-attr]


def test_protocol_places_are_not_reused_after_pruning(store: Store) -> None:
    first, last = (ended_batch(store, n=1, idempotency_key=f"lightning:{each}") for each in "ab")
    assert store.write(lambda connection: keyed_rollouts.assign_positions(connection, "lightning:")) == 2
    assert pruned(store, RetentionLevel.NOTHING) == [first]
    ended_batch(store, n=1, age_s=0.0, idempotency_key="lightning:c")
    assert store.write(lambda connection: keyed_rollouts.assign_positions(connection, "lightning:")) == 1
    reported, _, newest = store.read(lambda connection: keyed_rollouts.ended(connection, "lightning:", "c", 2, 10))
    assert (len(reported), newest) == (1, 3), "a client with two reported rollouts gets the third"
    assert pruned(store, RetentionLevel.NOTHING) == [last]


def test_long_silent_nodes_are_removed(store: Store) -> None:
    announce(store)
    assert Pruner(store).forget(DAY_S) == 0
    store.write(lambda connection: connection.execute(update(nodes).values(heartbeat_at=db_now() - OLD_S)))
    assert Pruner(store).forget(DAY_S) == 1
    assert store.read(lambda connection: connection.execute(select(nodes.c.node)).all()) == []


@pytest.mark.parametrize("kept", list(RetentionLevel))
def test_interrupted_pruning_is_resumed(store: Store, kept: RetentionLevel) -> None:
    """Stop it before each of its transactions in turn; readable data in between is complete or refused."""
    farm, source = farm_of(store), random.Random(kept)
    batch_id, control = ended_batch(store, n=3), ended_batch(store, n=1, age_s=0.0)
    whole = {each.rollout_id: len(farm.calls(each.rollout_id)) for each in farm.rollouts(batch_id)}
    n_runs = 0
    for _ in range(60):
        n_left = source.randrange(1, 6)

        def goes_on() -> bool:
            nonlocal n_left
            n_left -= 1
            return n_left >= 0

        n_runs += 1
        if pruned(store, kept, goes_on=goes_on):
            break
        for rollout_id, n_calls in whole.items():
            try:
                assert len(farm.calls(rollout_id)) == n_calls
            except (Pruned, NotFound):
                assert kept is not RetentionLevel.TRAJECTORIES
        # it can no longer be pinned or scored again
        if rows(store, batch_id)["batches"] and kept is not RetentionLevel.TRAJECTORIES:
            for change in (lambda: _pinned(store, batch_id), lambda: farm.rescore(batch_id)):
                if _is_marked(store, batch_id):
                    with pytest.raises(Pruned):
                        change()
    assert n_runs > 1
    assert pruned(store, kept) == []
    assert rows(store, control)["segments"] == 1
    if kept is RetentionLevel.NOTHING:
        assert set(rows(store, batch_id).values()) == {0}
    else:
        assert farm.violations(batch_id) == []


def _is_marked(store: Store, batch_id: str) -> bool:
    marked = select(batches.c.pruned).where(batches.c.batch_id == batch_id)
    return bool(store.read(lambda connection: connection.execute(marked).scalar_one()))


def test_half_pruned_batch_is_finished_at_its_own_level(store: Store) -> None:
    batch_id = ended_batch(store)
    may_go_on = iter([True, True])
    assert pruned(store, RetentionLevel.REWARDS, goes_on=lambda: next(may_go_on, False)) == []
    assert _is_marked(store, batch_id)
    assert pruned(store, RetentionLevel.TRAJECTORIES, older_s=1000 * DAY_S) == [batch_id]
    assert rows(store, batch_id)["segments"] == 0


def test_only_chosen_batches_are_pruned_and_dry_run_changes_nothing(store: Store) -> None:
    first, second = ended_batch(store), ended_batch(store)
    pruner = Pruner(store, pause=0.0)
    assert {each.batch_id for each in pruner.candidates(DAY_S, RetentionLevel.REWARDS)} == {first, second}
    assert [each.batch_id for each in pruner.candidates(DAY_S, RetentionLevel.REWARDS, [second])] == [second]
    assert rows(store, second)["segments"] == 2
    assert [each.batch_id for each in pruner.prune(DAY_S, RetentionLevel.REWARDS, [second])] == [second]
    assert rows(store, first)["segments"] == 2


def test_retention_settings_apply_while_the_process_leads(store: Store) -> None:
    leads = False
    keeper = RetentionKeeper(store, Settings(keep_trajectories_days=0.0), lambda: leads)
    batch_id, older = ended_batch(store, age_s=50 * DAY_S), ended_batch(store, age_s=100 * DAY_S)
    leads = True
    assert keeper.prune() == [], "for ever"
    keeper = RetentionKeeper(store, Settings(), lambda: leads)
    leads = False
    assert keeper.prune() == [], "another leads"
    leads = True
    assert [each.batch_id for each in keeper.prune()] == [older], "by default after 90 days"
    keeper = RetentionKeeper(store, Settings(keep_rewards_days=60.0, keep_trajectories_days=30.0), lambda: leads)
    assert [(each.batch_id, each.kept) for each in keeper.prune()] == [
        (older, RetentionLevel.NOTHING),
        (batch_id, RetentionLevel.REWARDS),
    ]
    with pytest.raises(FarmError):
        trajectories_of(store, batch_id)


def trajectories_of(store: Store, batch_id: str) -> Any:
    return store.read(lambda connection: trajectories.segments_of(connection, batch_id))


def test_pruning_shrinks_the_sqlite_file(sqlite_store: Store) -> None:
    """For Postgres, autovacuum does it."""
    store = sqlite_store
    batch_id = ended_batch(store, n=1, n_samples=1)
    noise = random.Random(1).randbytes(3_000_000)
    key = {"rollout_id": f"{batch_id}.0.0", "attempt": 1, "name": "noise"}
    values = {"media_type": "x", "n_bytes": 1, "data": noise, "created_at": 0.0}
    store.write(lambda connection: connection.execute(insert(artefact_rows).values(**key, **values)))

    def pages(connection: Connection) -> int:
        return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())

    before = store.read(pages)
    assert pruned(store) == [batch_id]
    assert store.read(pages) < before - 600
    assert store.read(lambda connection: connection.exec_driver_sql("PRAGMA integrity_check").scalar_one()) == "ok"


def test_prune_command_pins_lists_and_prunes(store: Store) -> None:
    batch_id, kept_id = ended_batch(store), ended_batch(store)
    here = ("--url", store.url)
    assert output_of(prune, kept_id, "--pin", *here) == f"{kept_id} is pinned\n"
    dry = output_of(prune, "--older-than", "14d", "--dry-run", *here)
    assert dry.endswith("kept: rewards\n1 batches, 2 rollouts would be pruned\n")
    assert rows(store, batch_id)["segments"] == 2
    assert output_of(prune, *here) == "0 batches, 0 rollouts pruned\n", "by the settings after 90 days"
    assert f"{batch_id}: 2 rollouts" in output_of(prune, "--older-than", "14d", *here)
    shown = output_of(show, f"{batch_id}.0.0", *here)
    assert f"batch {batch_id} was pruned on" in shown
    assert "0.5" in shown, "its reward"
    assert "Pruned" in output_of(prune, batch_id, "--pin", *here, code=1)
    assert output_of(prune, kept_id, "--unpin", *here) == f"{kept_id} is not pinned\n"
    assert f"{kept_id}: 2 rollouts" in output_of(prune, kept_id, "--older-than", "2w", "--keep", "nothing", *here)
    for words in (("--pin",), ("--keep", "nothing"), ("--older-than", "soon"), (kept_id, "--pin", "--unpin")):
        output_of(prune, *words, *here, code=2)
    assert "an API does not prune" in output_of(prune, "--url", "http://127.0.0.1:1", code=1)

"""The checks of the chaos run find what they are for: in a correct farm's store, broken in one place at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import ColumnElement, Executable, Table, Update, delete, select, update

import farm
from farm.records.rollout import Stage
from farm.records.trajectory import ModelCall, segments, token_ids
from farm.store import trajectories
from farm.store.database import Store
from farm.store.rollouts import attempts, rewards, rollouts
from farm.store.trajectories import CallLog, segment_rows
from tests.chaos import checks, problems
from tests.chaos.checks import Evidence
from tests.chaos.client import Journal, Order
from tests.chaos.parts import Parts
from tests.chaos.run import Run
from tests.chaos.strikes import Interventions
from tests.contract.store.test_store import advance, claimed, finish, place
from tests.services.model_calls import model_call

SEED = 3


def _call(salt: int) -> ModelCall:
    call = model_call()
    call.prompt_ids, call.response_ids = token_ids([salt]), token_ids([7, 8])
    call.response_logprobs = -call.response_ids.astype("float32")
    return call


def _run_rollout(store: Store, rollout: farm.Rollout, reward: float) -> None:
    """Run a rollout from a clean sandbox to its reward, with one call and its training row."""
    assert advance(store, claimed(store, rollout.rollout_id, Stage.INIT))
    held = claimed(store, rollout.rollout_id, Stage.RUN)
    call = _call(rollout.sample_index)
    row = CallLog(rollout.rollout_id, 1).row(call)
    store.write(lambda connection: trajectories.record_call(connection, row))
    made = segments([call])
    store.write(
        lambda connection: trajectories.store_segments(connection, rollout.rollout_id, rollout.batch_id, 1, made)
    )
    assert advance(store, held, policy_outcome="submitted", submission={"answer": "1"}, n_segments=len(made))
    assert finish(store, claimed(store, rollout.rollout_id, Stage.EVAL), reward)


def _order(folder: Path) -> Order:
    return Order("client0", SEED, f"sqlite:///{folder}/farm.db", "", str(folder))


@pytest.fixture(scope="module")
def finished_farm(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a farm with one client, whose first batch was completed and delivered; to be copied."""
    folder = tmp_path_factory.mktemp("chaos")
    shutil.copy(migrated_sqlite, folder / "farm.db")
    order = _order(folder)
    problems.write(order.instances)
    store = Store(order.address)
    journal = Journal(order.journal)
    worth = problems.ExpectedScore(SEED)
    with farm.connect(order.address, broker_url="") as client:
        batch_request = order.request(0)
        batch_id = client.submit(batch_request)
        journal.write(begin=0)
        journal.write(batch=0, batch_id=batch_id)
        place(store, batch_id)
        for rollout in client.rollouts(batch_id):
            seed = batch_request.sampling.seed or 0
            reward = worth.reward(rollout.instance_id, seed, rollout.group_index, rollout.sample_index)
            _run_rollout(store, rollout, reward)
        for group in client.stream_groups(batch_id):
            journal.record_group(group)
        journal.write(done=0)
    store.close()
    return folder


@pytest.fixture
def evidence(finished_farm: Path, tmp_path: Path) -> Iterator[Evidence]:
    """Yield evidence of the same farm, in this test's own folder."""
    shutil.copytree(finished_farm, tmp_path, dirs_exist_ok=True)
    order = _order(tmp_path)
    store = Store(order.address)
    yield Evidence(store, [order], SEED, Interventions())
    store.close()


def test_farm_in_order_passes_all_checks(evidence: Evidence) -> None:
    assert checks.all_of(evidence) == []


def _set(**values: Any) -> Update:
    """Return an update of the first sample of the first group."""
    return update(rollouts).where(_first(rollouts)).values(**values)


def _first(table: Table) -> ColumnElement[bool]:
    return table.c.rollout_id.like("%.0.0")


BROKEN: list[tuple[str, Executable]] = [
    ("conservation", delete(rollouts).where(_first(rollouts))),
    ("every rollout ends", _set(state="queued", finish_seq=None, finished_at=None, outcome=None, reward=None)),
    ("nothing broken is scored", _set(reward=0.123)),
    ("nothing broken is scored", _set(reward=None)),
    ("nothing broken is scored", _set(state="failed", outcome="lost", failure_kind="lost")),
    (
        "only injected faults fail a rollout",
        _set(state="failed", outcome="agent_error", failure_kind="agent_error"),
    ),
    ("only requested cancels happen", _set(state="cancelled", outcome="cancelled", reward=None)),
    ("cancelled stays cancelled", _set(outcome="cancelled")),
    ("a score for each scoring", delete(rewards).where(_first(rewards))),
    ("the same score each time", delete(rewards).where(_first(rewards))),
    ("a score for each scoring", update(attempts).where(_first(attempts)).values(result="lost")),
    ("token exactness", delete(segment_rows)),
    ("token exactness", update(segment_rows).values(response_ids=token_ids([8, 7]))),
    ("delivered rollouts stay unchanged", _set(reward=0.123)),
    ("every rollout ends once", _set(finish_seq=9999)),
    ("groups are whole", delete(rollouts).where(_first(rollouts))),
    ("nothing is lost", delete(rollouts).where(rollouts.c.group_index == 0)),
    ("audit", _set(owner="somebody")),
]


@pytest.mark.parametrize(("promise", "change"), BROKEN, ids=[f"{n}-{each[0]}" for n, each in enumerate(BROKEN)])
def test_broken_record_is_detected(evidence: Evidence, promise: str, change: Executable) -> None:
    evidence.store.write(lambda connection: connection.execute(change))
    assert promise in {each.promise for each in checks.all_of(evidence)}


def test_batch_unknown_to_its_client_is_reported_as_duplicate(evidence: Evidence) -> None:
    with farm.connect(evidence.store.url, broker_url="") as client:
        again = client.submit({"instances": [problems.noop(0.0)]})
    assert ("a batch is made once", again) in {(each.promise, each.id) for each in checks.all_of(evidence)}


def test_rescored_rollout_may_end_twice(evidence: Evidence) -> None:
    (first, *_) = evidence.store.read(
        lambda connection: connection.execute(select(rollouts.c.rollout_id)).scalars().all()
    )
    again = update(rollouts).where(rollouts.c.rollout_id == first).values(finish_seq=9999)
    evidence.store.write(lambda connection: connection.execute(again))
    evidence.done.rescored.add(first)
    assert {each.promise for each in checks.all_of(evidence)} == {"audit"}, "the number was never given out"


def test_undelivered_group_is_reported(evidence: Evidence) -> None:
    journal = evidence.orders[0].journal
    lines = [line for line in journal.read_text().splitlines() if '.0", "cursor"' not in line]
    journal.write_text("\n".join(lines))
    assert {each.promise for each in checks.all_of(evidence)} == {"every group is delivered"}


def test_cancelled_rollout_in_another_state_is_reported(evidence: Evidence) -> None:
    evidence.done.cancelled.add("b0.0.0")
    assert {each.promise for each in checks.all_of(evidence)} == {"cancelled stays cancelled"}


def test_unfinished_rollouts_are_written_to_the_logs(sqlite_store: Store, tmp_path: Path) -> None:
    with farm.connect(sqlite_store.url) as client:
        batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {}}]})
        parts = cast(Parts, SimpleNamespace(farm=client, store=sqlite_store, logs=tmp_path))
        Run(parts, ()).report_open_rollouts()
    text = (tmp_path / "unended").read_text()
    assert f"'rollout_id': '{batch_id}.0.0', 'stage': 'init', 'state': 'queued'" in text

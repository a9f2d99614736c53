"""The job keeper: submits and cancels as the queue requires, one keeper at a time, with backoff after failed jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.home import write_own
from farm.launch.slurm_keeper import SlurmKeeper, status
from farm.launch.slurm_pool import SlurmPool, script_path, store_pools
from farm.records.node import Node
from farm.records.request import BatchRequest
from farm.store import batches, nodes
from farm.store.database import Store
from tests.secret_keys import key_of
from tests.unit.farm.launch.fake_slurm import FakeSlurm

POOL = SlurmPool(min=1, max=4, init_slots=1, run_slots=2, eval_slots=1)


class Lab:
    """A keeper of one pool, on a store and a fake Slurm; `now` is its clock."""

    def __init__(self, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.store, self.now = folder, store, 0.0
        self.slurm = FakeSlurm(folder / "lab", monkeypatch)
        script = script_path(folder, "node")
        script.parent.mkdir()
        write_own(script, "#SBATCH --job-name=farm-ab12-node\n")
        self.pool(POOL)
        self.keeper = self.another("one")

    def another(self, owner: str) -> SlurmKeeper:
        return SlurmKeeper(self.folder, "ab12", self.store.url, owner, 60.0, lambda: self.now)

    def pool(self, pool: SlurmPool) -> None:
        store_pools(self.folder, {"node": pool})

    def node_of(self, job: str) -> None:
        node = Node(f"n{job}", 4, 1, 2, 1, ["noop"], {"slurm_job": job}, instance=f"i{job}")
        self.store.write(lambda connection: nodes.announce(connection, node))

    def round(self, after_s: float = 5.0) -> int:
        self.now += after_s
        self.keeper.round()
        return len(self.slurm.jobs())


@pytest.fixture
def lab(tmp_path: Path, sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, sqlite_store, monkeypatch)


def submit(store: Store, n: int) -> None:
    request = BatchRequest.model_validate({"instances": [{"data_source": "noop", "fields": {}}] * n})
    store.write(lambda connection: batches.create(connection, request, "of a test", key_of(store)))


def test_jobs_grow_with_the_queue_and_shrink_when_nodes_are_idle(lab: Lab) -> None:
    assert lab.round() == 1
    assert lab.round() == 1, "a pending job counts"
    lab.slurm.run_all()
    lab.node_of("1")
    submit(lab.store, 9)
    assert lab.round() == 3, "nine rollouts, four to a node"
    submit(lab.store, 100)
    assert lab.round() == 4, "at most the maximum"
    assert status(lab.folder) == {"node": {"wanted": 4, "fault": ""}}
    lab.pool(POOL.model_copy(update={"max": 2}))
    assert lab.round() == 2, "pending jobs are cancelled"
    lab.slurm.run_all()
    for job in lab.slurm.jobs()[1:]:
        lab.node_of(job.partition("|")[0])
    lab.pool(POOL.model_copy(update={"min": 0, "max": 0}))
    assert lab.round() == 2
    assert lab.round(61.0) == 0, "idle for a minute"
    assert status(lab.folder)["node"]["fault"] == "", "a cancelled job has not failed"


def test_successor_is_submitted_once_waiting_rollouts_may_outlast_the_job(lab: Lab) -> None:
    lab.round()
    lab.slurm.run_all("29:00")
    lab.node_of("1")
    assert lab.round() == 1
    # limits of half an hour
    submit(lab.store, 1)
    assert lab.round() == 2


def test_successor_is_submitted_before_the_time_limit(lab: Lab) -> None:
    lab.round()
    lab.slurm.run_all("9:59")
    lab.node_of("1")
    assert lab.round() == 2
    assert lab.round() == 2


def test_failing_jobs_are_retried_with_backoff_and_the_reason_is_shown(lab: Lab) -> None:
    lab.round()
    n_tries = 1
    for _ in range(100):
        lab.slurm.set_jobs()
        n_tries += lab.round()
    assert 4 <= n_tries <= 7, "100 rounds, 500 s"
    assert "ended before a node of it was known" in str(status(lab.folder)["node"]["fault"])
    lab.slurm.refuse("sbatch: error: Batch job submission failed: Invalid account")
    lab.round(1000.0)
    assert "Invalid account" in str(status(lab.folder)["node"]["fault"])
    lab.slurm.accept()
    assert lab.round(1000.0) == 1
    lab.slurm.run_all()
    lab.node_of(lab.slurm.jobs()[0].partition("|")[0])
    lab.round()
    assert status(lab.folder)["node"]["fault"] == ""


def test_only_one_keeper_runs_at_a_time(lab: Lab) -> None:
    lab.round()
    lab.slurm.set_jobs()
    other = lab.another("two")
    other.round()
    assert lab.slurm.jobs() == []
    lab.keeper.start()
    lab.keeper.stop()
    lab.slurm.set_jobs()
    other.round()
    assert len(lab.slurm.jobs()) == 1


def test_farm_without_jobs_is_not_changed(lab: Lab) -> None:
    (lab.folder / "slurm.json").unlink()
    assert lab.round() == 0

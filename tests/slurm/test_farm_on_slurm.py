"""A farm on a real Slurm of four node daemons: `make test-slurm`. Each failure that users reported has a case here."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import farm
from farm.launch.shared_address import read_address
from farm.launch.slurm_commands import SlurmJob, jobs_named
from farm.launch.slurm_pool import HEAD, SIGNAL_S, stored_pools
from farm.records.rollout import Stage, State
from farm.store import nodes
from farm.store.database import Store
from tests.services.farms import QUICK, farm_folder, left_of, until
from tests.services.servers.slurm_cluster import SlurmCluster
from workers.testing import plugin_path

SEED = int(os.environ.get("FARM_TEST_SEED", "7"))
N_EVENTS = int(os.environ.get("FARM_SLURM_EVENTS", "6"))
LONG_S = 900.0
CONFIG = """
[slurm.cpu]
partition = "cpu"
cpus = 1
time = "20"
min = 1
max = 2
run_slots = 2
[slurm.big]
partition = "big"
cpus = 1
time = "20"
min = 0
max = 2
run_slots = 2
"""


class FarmOnSlurm:
    """A farm in a folder, by its commands."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder, self.shared, self.cluster = folder, folder / "shared", cluster
        (folder / "farm.toml").write_text(CONFIG)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "SLURM"))}
        own |= {**QUICK, "FARM_LEASE_S": "30", "FARM_NODE_TIMEOUT_S": "30", "FARM_SCRATCH": str(folder / "scratch")}
        own |= {"FARM_CONFIG": str(folder / "farm.toml"), "SLURM_CONF": str(cluster.config)}
        self.env = own | {"PYTHONPATH": plugin_path.python_path(plugin_path.PLUGINS)}

    def __call__(self, *words: str) -> str:
        command = [sys.executable, "-m", "farm.cli.main", "slurm", *words, "--dir", str(self.shared)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def jobs(self, pool: str = "") -> list[SlurmJob]:
        os.environ["SLURM_CONF"] = str(self.cluster.config)
        names = [f"farm-{self.farm_id}-{name}" for name in ([pool] if pool else stored_pools(self.shared))]
        return jobs_named(names)

    @property
    def farm_id(self) -> str:
        address = read_address(self.shared)
        assert address is not None
        return address.farm_id

    def nodes(self) -> dict[str, str]:
        """Return job → node, of those that are up."""
        address = read_address(self.shared)
        assert address is not None
        if not address.head:
            return {}
        store = Store(address.store_url)
        try:
            up = [each for each in store.read(nodes.listing) if each.state == "up"]
            # 20 minutes, minus those in which Slurm tells a job to end
            assert all(0 < each.info["job_left_s"] <= 1200 - SIGNAL_S for each in up)
            return {str(each.info.get("slurm_job")): each.node for each in up}
        finally:
            store.close()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in (self.shared / "logs").glob("*.log"))


@pytest.fixture(scope="module")
def on_slurm(cluster: SlurmCluster) -> Iterator[FarmOnSlurm]:
    with farm_folder() as folder:
        here = FarmOnSlurm(folder, cluster)
        began = time.monotonic()
        here("up")
        print(f"\nfrom `farm slurm up` to the first node: {time.monotonic() - began:.0f} s")
        try:
            yield here
        finally:
            here("down")
        assert here.jobs() == []
        until(lambda: left_of(folder) == [], lambda: f"nothing is left: {left_of(folder)}")


def submitted(client: farm.Farm, n: int, seconds: float) -> str:
    return client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": seconds}}] * n})


def all_are_there(client: farm.Farm, batch_id: str, n: int) -> None:
    """Check that every rollout ended with a reward, and no event on its node counts against it."""
    ended = client.collect(batch_id, timeout_s=LONG_S)
    assert len(ended) == n
    counted = {(each.state, each.reward is not None, each.n_failures, each.n_lost) for each in ended}
    assert counted == {(State.COMPLETED, True, 0, 0)}
    assert client.violations(batch_id) == []


class IdleShare:
    """`with`: samples how many slots of running jobs have no running rollout, from submit until none waits."""

    def __init__(self, on_slurm: FarmOnSlurm, client: farm.Farm, batch_id: str) -> None:
        self._on_slurm, self._client, self._batch_id = on_slurm, client, batch_id
        self._n_slots = self._n_idle = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            stages = self._client.status(self._batch_id).stages
            if not sum(stages[stage][State.QUEUED] for stage in (Stage.INIT, Stage.RUN)):
                return
            pools = stored_pools(self._on_slurm.shared)
            n_slots = sum(
                pool.slots[1] * sum(not job.pending for job in self._on_slurm.jobs(name))
                for name, pool in pools.items()
                if name != HEAD
            )
            self._n_slots += n_slots
            self._n_idle += max(0, n_slots - stages[Stage.RUN][State.ACTIVE])

    def __enter__(self) -> IdleShare:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __str__(self) -> str:
        return f"{self._n_idle / max(1, self._n_slots):.0%} of slots were idle while rollouts waited"


def test_farm_grows_with_the_queue_over_two_partitions_and_shrinks_again(on_slurm: FarmOnSlurm) -> None:
    with farm.connect(on_slurm.shared) as client:
        began = time.monotonic()
        assert client.wait(submitted(client, 1, 0.0), LONG_S).n_completed == 1
        print(f"\nthe first rollout: {time.monotonic() - began:.1f} s more")
        batch_id, began = submitted(client, 120, 6.0), time.monotonic()
        with IdleShare(on_slurm, client, batch_id) as idle:
            until(lambda: len(on_slurm.nodes()) == 4, on_slurm.logs, LONG_S)
            print(f"\nfrom one node to four: {time.monotonic() - began:.0f} s")
            assert {job.partition for job in on_slurm.jobs() if job.job_id in on_slurm.nodes()} == {"cpu", "big"}
            shown = on_slurm("ls")
            assert "cpu: 2 jobs, 2 wanted, from 1 to 2" in shown
            for job, name in on_slurm.nodes().items():
                assert f"Node {name} is ready" in on_slurm("logs", name)
                assert f"Node {name} is ready" in on_slurm("logs", job)
            assert "ready; nodes: farm node --at" in on_slurm("logs", "head")
            all_are_there(client, batch_id, 120)
        print(f"\n{idle}")
        until(lambda: len(on_slurm.jobs("cpu")) + len(on_slurm.jobs("big")) == 1, "it shrinks to its least", LONG_S)
        assert on_slurm.jobs("big") == []


def _has_another(on_slurm: FarmOnSlurm, before: frozenset[str]) -> bool:
    return any(each.job_id not in before for each in on_slurm.jobs())


def _is_away(on_slurm: FarmOnSlurm, job: str) -> bool:
    return job not in on_slurm.nodes()


def test_events_of_jobs_cost_no_rollout_and_no_attempt(on_slurm: FarmOnSlurm) -> None:
    chance = random.Random(SEED)
    slurm = on_slurm.cluster.output_of
    on_slurm("scale", "2", "--pool", "cpu")
    on_slurm("scale", "2", "--pool", "big")
    with farm.connect(on_slurm.shared) as client:
        batch_id = submitted(client, 24 * N_EVENTS, 4.0)
        for n in range(N_EVENTS):
            until(lambda: len(on_slurm.nodes()) >= 3, on_slurm.logs, LONG_S)
            known = {each.job_id: each.array_element for each in on_slurm.jobs()}
            job = chance.choice(sorted(on_slurm.nodes().keys() & known.keys()))
            place = known[job]
            kinds = ["scancel", "requeue", "signal", "time limit"]
            kind = kinds[n] if n < len(kinds) else chance.choice(kinds)
            print(f"event {n}: {kind} of {place}", flush=True)
            if kind == "scancel":
                slurm("scancel", place)
            elif kind == "requeue":
                slurm("scontrol", "requeue", place)
            elif kind == "signal":
                slurm("scancel", "--signal=TERM", place)
            else:
                # two minutes from now, of which the signal takes the last
                run_s = next(1200 - each.left_s for each in on_slurm.jobs() if each.job_id == job)
                slurm("scontrol", "update", f"JobId={place}", f"TimeLimit={int(run_s // 60) + 2}")
                before = frozenset(each.job_id for each in on_slurm.jobs())
                until(partial(_has_another, on_slurm, before), "a successor is submitted", LONG_S)
            until(partial(_is_away, on_slurm, job), f"the node of {job} has ended", LONG_S)
        all_are_there(client, batch_id, 24 * N_EVENTS)


def _head_job(on_slurm: FarmOnSlurm) -> str:
    """Return the place of the job whose head leads."""
    pid = json.loads((on_slurm.shared / "head.json").read_text())["process"]["pid"]
    env = dict(each.split("=", 1) for each in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in each)
    return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"


@pytest.mark.parametrize("how", ["killed", "requeued", "cancelled"])
def test_head_that_ends_is_followed_by_the_standby(on_slurm: FarmOnSlurm, how: str) -> None:
    until(lambda: sum(not job.pending for job in on_slurm.jobs("head")) == 2, "one stands by", LONG_S)
    with farm.connect(on_slurm.shared) as client:
        batch_id = submitted(client, 30, 2.0)
        until(lambda: client.status(batch_id).n_finished >= 2, "it runs", LONG_S)
    before = read_address(on_slurm.shared)
    if how == "killed":
        os.kill(json.loads((on_slurm.shared / "head.json").read_text())["process"]["pid"], signal.SIGKILL)
    else:
        words = ("scontrol", "requeue") if how == "requeued" else ("scancel",)
        on_slurm.cluster.output_of(*words, _head_job(on_slurm))

    def another() -> bool:
        after = read_address(on_slurm.shared)
        return before is not None and after is not None and after.head not in ("", before.head)

    until(another, "another leads", LONG_S)
    with farm.connect(on_slurm.shared) as client:
        all_are_there(client, batch_id, 30)
    until(lambda: sum(not job.pending for job in on_slurm.jobs("head")) == 2, "and another stands by", LONG_S)


def test_down_releases_rollouts_that_the_next_up_runs(on_slurm: FarmOnSlurm) -> None:
    with farm.connect(on_slurm.shared) as client:
        batch_id = submitted(client, 12, 6.0)
        until(lambda: client.status(batch_id).stages[Stage.RUN][State.ACTIVE] >= 2, "it runs", LONG_S)
    on_slurm("down")
    assert on_slurm.jobs() == []
    until(lambda: left_of(on_slurm.folder) == [], lambda: f"nothing is left: {left_of(on_slurm.folder)}")
    on_slurm("up")
    with farm.connect(on_slurm.shared) as client:
        all_are_there(client, batch_id, 12)


def test_mistakes_are_one_line(on_slurm: FarmOnSlurm) -> None:
    def refused(*words: str) -> str:
        command = [sys.executable, "-m", "farm.cli.main", "slurm", *words]
        done = subprocess.run(command, env=on_slurm.env, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode
        return done.stderr

    at = ("--dir", str(on_slurm.folder / "other"))
    assert "there is no table [slurm.gpu] in farm.toml" in refused("up", *at, "--pool", "gpu")
    assert "runs on Slurm: `farm slurm up --dir" in refused("ls", *at)
    assert "invalid partition" in refused("up", *at, "--partition", "nosuch", "--no-wait").lower()
    assert "there is no log of nosuch" in refused("logs", "nosuch", "--dir", str(on_slurm.shared))
    with suppress(FileNotFoundError):
        assert not list((on_slurm.folder / "other" / "logs").iterdir())

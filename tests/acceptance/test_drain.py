"""SIGTERM to a node: running stages continue for a grace, the rest is requeued, and no attempt is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import farm
from examples.problems import math_problems
from farm.client.local import LocalFarm
from farm.records.node import BROKEN, DRAINING, UP
from farm.store import migrations, nodes
from farm.store.database import Store
from testkit.postgres import postgres_server
from testkit.private_server import Missing
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.api import served, shown_key
from tests.services.farms import farm_folder, left_of, node, processes_of, until
from tests.services.unruly import installed_in
from workers.testing.scripted_model import Script
from workers.testing.serving import serving

PATIENT = {"FARM_LEASE_S": "60", "FARM_NODE_TIMEOUT_S": "60"}
"""On a busy machine a worker may be silent for as long as the short timeouts."""
FOR_EVER = {"data_source": "noop", "fields": {"seconds": 600.0}}


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture
def store(postgres_store: Store) -> Store:
    return postgres_store


def until_running(client: farm.Farm, batch_id: str, n: int) -> None:
    until(lambda: client.status(batch_id).stages[farm.Stage.RUN][farm.State.ACTIVE] >= n, f"{n} run", 120)


def draining(store: Store) -> bool:
    return [each.state for each in store.read(nodes.listing)] in ([DRAINING], [])


def family(pid: int) -> list[int]:
    """Return a process and all its descendants, sandboxes too: what Slurm calls a job step."""
    parents = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                parents[int(process.name)] = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    result = [pid]
    for each in result:
        result += [child for child, parent in parents.items() if parent == each]
    return result


def worker_of(supervisor: int, stage: str) -> int:
    words = f"{stage}@".encode()
    return next(pid for pid in family(supervisor) if words in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_drained_node_ends_running_rollouts_and_requeues_the_rest(folder: Path, store: Store, broker_url: str) -> None:
    with farm.connect(store.url, broker_url=broker_url) as client:
        with node(folder, "one", store.url, broker_url, grace_s=1200, **PATIENT) as one:
            # the node takes sixteen, of which eight run at a time
            batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 2.0}}] * 30})
            until_running(client, batch_id, 8)
            n_ended = client.status(batch_id).n_finished
            one.terminate()
            assert one.wait(600) == 0, "it ends long before its grace does"
        rollouts = client.rollouts(batch_id)
        completed = [rollout for rollout in rollouts if rollout.state is farm.State.COMPLETED]
        assert n_ended + 8 <= len(completed) < 30
        assert {rollout.node for rollout in rollouts if rollout not in completed} == {None}
        assert store.read(nodes.listing) == []
        with node(folder, "two", store.url, broker_url):
            ended = client.collect(batch_id, timeout_s=600)
        assert all(rollout.reward is not None and rollout.attempt == 1 for rollout in ended)
        assert {rollout.node for rollout in ended} == {"one", "two"}
    assert left_of(folder) == []


@pytest.mark.parametrize("by", ["client", "api"])
def test_drain_order_works_like_a_signal(folder: Path, store: Store, broker_url: str, by: str) -> None:
    with ExitStack() as running:
        client = running.enter_context(farm.connect(store.url, broker_url=broker_url))
        orders = client
        if by == "api":
            assert isinstance(client, LocalFarm)
            running.enter_context(shown_key())
            orders = running.enter_context(farm.connect(running.enter_context(served(client))))
        with node(folder, "one", store.url, broker_url, grace_s=1200, **PATIENT) as one:
            batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {"seconds": 2.0}}] * 30})
            until_running(client, batch_id, 8)
            with pytest.raises(farm.NotFound, match="there is no node two"):
                orders.drain_node("two")
            orders.drain_node("one")
            assert one.wait(600) == 0
        assert store.read(nodes.listing) == []
        assert any(rollout.node is None for rollout in client.rollouts(batch_id)), "it did not begin the rest"
        # a node of that name that is started later is not draining
        with node(folder, "one", store.url, broker_url):
            ended = client.collect(batch_id, timeout_s=600)
        assert all(rollout.reward is not None and rollout.attempt == 1 for rollout in ended)
    assert left_of(folder) == []


def test_signal_to_every_process_of_a_job_step_drains_the_node(folder: Path, store: Store, broker_url: str) -> None:
    with (
        serving(EngineDouble(Script([]), latency_s=4.0).app()) as policy,
        farm.connect(store.url, broker_url=broker_url) as client,
        node(folder, "one", store.url, broker_url, grace_s=120, FARM_POLICY_URL=f"{policy}/v1", **PATIENT) as one,
    ):
        problems = tuple(math_problems(["gcd"], 4, seed=1))
        batch_id = client.submit(farm.BatchRequest(instances=problems, n_samples=2))
        until_running(client, batch_id, 8)
        step = family(one.pid)
        assert len(step) > 4 + 8, "the supervisor, its workers and the sandboxes"
        for pid in step:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        one.wait(600)
        ended = client.rollouts(batch_id)
        result = {(rollout.state, rollout.attempt) for rollout in ended}
        assert result == {(farm.State.COMPLETED, 1)}, Counter(str(rollout.failure) for rollout in ended)
    assert left_of(folder) == []


def test_second_signal_ends_the_grace_and_requeues_hung_rollouts(folder: Path, store: Store, broker_url: str) -> None:
    with farm.connect(store.url, broker_url=broker_url) as client:
        with node(folder, "one", store.url, broker_url, grace_s=600, **PATIENT) as one:
            batch_id = client.submit({"instances": [FOR_EVER] * 12})
            until_running(client, batch_id, 8)
            os.kill(worker_of(one.pid, "run"), signal.SIGSTOP)
            one.terminate()
            until(lambda: draining(store), "the node drains")
            assert one.poll() is None
            until(lambda: _terminate_again(one), "the grace is over", 120)
        rollouts = client.rollouts(batch_id)
        assert {(rollout.state, rollout.node) for rollout in rollouts} == {(farm.State.QUEUED, None)}
        results = {timing.result for rollout in rollouts for timing in client.timings(rollout.rollout_id)}
        assert results == {"advanced", "drained"}, "nothing counts as lost or failed"
        client.cancel(batch_id)
    assert left_of(folder) == []


def _terminate_again(process: subprocess.Popen[bytes]) -> bool:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    return process.poll() is not None


def test_stage_that_breaks_while_stopped_is_requeued_without_a_failure(
    folder: Path, store: Store, broker_url: str
) -> None:
    breaks = {"data_source": "unruly", "fields": {"fault": "evaluate:hang and break"}}
    with farm.connect(store.url, broker_url=broker_url) as client:
        with node(folder, "one", store.url, broker_url, 0, **installed_in(folder)):
            until(lambda: [each.state for each in store.read(nodes.listing)] == [UP], "the node is up", 120)
            batch_id = client.submit({"instances": [breaks] * 4, "max_attempts": 1})
            until(
                lambda: client.status(batch_id).stages[farm.Stage.EVAL][farm.State.ACTIVE] == 4, "they are scored", 120
            )
        rollouts = client.rollouts(batch_id)
        assert {(rollout.state, rollout.n_failures) for rollout in rollouts} == {(farm.State.QUEUED, 0)}
        client.cancel(batch_id)
    assert left_of(folder) == []


def test_node_exits_while_its_database_is_away(folder: Path, broker_url: str) -> None:
    with ExitStack() as servers:
        try:
            store = Store(servers.enter_context(postgres_server()))
        except Missing as missing:
            absent(str(missing))
        migrations.migrate(store)
        store.close()
        with node(folder, "one", store.url, broker_url, grace_s=1) as one:
            with farm.connect(store.url, broker_url=broker_url) as client:
                batch_id = client.submit({"instances": [FOR_EVER] * 4})
                until_running(client, batch_id, 4)
            servers.close()
            one.terminate()
            one.wait(600)
    assert "exits without the database" in (folder / "one.log").read_text()
    until(lambda: not processes_of(folder), lambda: f"nothing is left: {processes_of(folder)}")
    assert left_of(folder) == []


def test_node_with_repeatedly_dying_workers_gets_no_rollouts(folder: Path, store: Store, broker_url: str) -> None:
    with (
        node(folder, "one", store.url, broker_url) as one,
        farm.connect(store.url, broker_url=broker_url) as client,
    ):

        def state() -> str:
            with suppress(StopIteration, OSError):
                os.kill(worker_of(one.pid, "run"), signal.SIGKILL)
            return "".join(each.state for each in store.read(nodes.listing))

        until(lambda: state() == BROKEN, "the node says so", 120)
        batch_id = client.submit({"instances": [FOR_EVER] * 4})
        (result,) = store.read(nodes.listing)
        assert "run workers" in result.info[BROKEN]
        # the dispatcher has seen the batch by then
        until(lambda: state() and "3 times in a row" in (folder / "one.log").read_text(), "it is written down")
        assert {rollout.node for rollout in client.rollouts(batch_id)} == {None}

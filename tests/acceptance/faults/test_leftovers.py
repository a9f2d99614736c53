"""kill -9 at random points of everything that makes and holds sandboxes: in the end nothing is left on the node.

`FARM_TEST_SEED` selects another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.embedded.node_folder import locked
from farm.records.request import SandboxSpec
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in, python
from tests.services.farms import farm_folder, until
from tests.services.soak import at_length, repeats
from workers.sandboxes.isolation.namespaces import started_at
from workers.sandboxes.lifecycle.reaper import sweep_all, sweep_dead_nodes
from workers.sandboxes.lifecycle.state import Process, SandboxRecord
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.remove_tree import remove

KILLS = repeats(15, 200)
SEED = os.environ.get("FARM_TEST_SEED", "1")
STOPPED = 0.1
"""The share that is stopped with SIGSTOP instead, and still exists when the others end."""


@pytest.fixture
def folder(apptainer: Path) -> Iterator[Path]:
    if missing := NamespaceProvider().missing():
        absent(missing)
    with farm_folder() as made, farm_in(made):
        (made / "scratch").mkdir(mode=0o711)
        yield made
        remove(made)


class _Node:
    """A supervisor, and all its descendants, identified by their folder."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self._folder = folder
        for log in folder.glob("*.log"):
            log.unlink()
        # where nothing else shows its owner, as with children of the fork server
        path = f"{os.environ['PATH']}:{folder}/none"
        argv = [sys.executable, "-m", "tests.services.crowd", "supervisor", json.dumps({"seed": SEED, **plan})]
        self.supervisor = subprocess.Popen(argv, env={**os.environ, "PATH": path}, cwd=Path(__file__).parents[3])

    def processes(self, others: set[int] | None = None) -> dict[str, list[int]]:
        """Return pids by kind of process. `others` are known not to be ours, and grow: checking each is expensive."""
        others = {os.getpid(), self.supervisor.pid} if others is None else others
        result: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (pid := int(entry.name)) not in others:
                with contextlib.suppress(OSError):
                    if self._is_ours(entry):
                        result.setdefault(_kind_of(entry), []).append(pid)
                    else:
                        others.add(pid)
        return result

    def pids(self) -> set[int]:
        return {pid for pids in self.processes().values() for pid in pids}

    def _is_ours(self, process: Path) -> bool:
        """Return whether its environment, arguments, mounts or directory name our folder; false once it has ended."""
        mark = str(self._folder).encode()
        for name in ("environ", "cmdline", "mountinfo"):
            with contextlib.suppress(OSError):
                if mark in (process / name).read_bytes():
                    return True
        return mark in bytes((process / "cwd").readlink())

    def send_signal(self, pid: int, number: int) -> None:
        """Send a signal, if the pid is still ours."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if self._is_ours(Path(f"/proc/{pid}")):
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)

    def unblock(self) -> None:
        """Kill the supervisor's own stopped children: it waits for removers, and treats stopped workers as busy."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                state, parent = _stat(Path(f"/proc/{pid}"))[:2]
                if state == "T" and int(parent) == self.supervisor.pid:
                    self.send_signal(pid, signal.SIGKILL)

    def kill(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait()

    def left(self) -> list[str]:
        """Return everything that should be gone: processes and their mounts, node mounts, sandboxes, sockets."""
        processes = [f"{what} {pid}" for what, pids in self.processes().items() for pid in pids]
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self._folder) in line]
        # not by rglob, which fails on files that are removed during the walk
        walk = os.walk(sandbox_config().sandboxes_folder)
        return processes + mounts + [f"{parent}/{name}" for parent, folders, files in walk for name in folders + files]


def _kind_of(process: Path) -> str:
    """Return the kind of a process by its arguments; a forked process has those of its parent."""
    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    parent = _parent(process)
    if "fork_server" in words:
        with contextlib.suppress(OSError):
            if "tests.services.crowd" in Path(f"/proc/{parent}/cmdline").read_text():
                return "porter"
        return "forked by the porter"
    names = {
        "tests.services.crowd": "worker",
        "sandbox-monitor": "monitor",
        "echo up; while": "first process",
        "kernel.zygote": "interpreter",
        "pptainer": "runtime",
        "rm -rf": "remover",
    }
    return next((what for mark, what in names.items() if mark in words), "inside")


def _parent(process: Path) -> int:
    return int(_stat(process)[1])


def _stat(process: Path) -> list[str]:
    """Return its fields from the state on."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def sandboxes() -> list[SandboxRecord]:
    """Return the records of the sandboxes that are up."""
    parent = sandbox_config().sandboxes_folder
    records = [SandboxRecord.load(path) for path in parent.iterdir()] if parent.is_dir() else []
    return [record for record in records if record and record.first.alive() and record.monitor.alive()]


@pytest.mark.soak
def test_all_processes_end_with_their_supervisor(folder: Path) -> None:
    chance = random.Random(SEED)
    kinds = at_length({"namespace": 9, "singularity": 2}, {"namespace": 88, "singularity": 12})
    node = _Node(folder, n_workers=2, kinds=kinds, comes_and_goes=False)
    try:
        until(lambda: _all_are_up(folder, node) >= 2, "all sandboxes are up", 240)
        assert Counter(record.kind for record in sandboxes()) == {kind: 2 * n for kind, n in kinds.items()}
        before = node.processes()
        assert len(before["first process"]) >= 2 * sum(kinds.values())
        for what in ("monitor", "first process", "porter", "forked by the porter"):
            for pid in chance.sample(before[what], max(1, len(before[what]) // 10)):
                node.send_signal(pid, signal.SIGKILL)
    finally:
        node.kill()
    # all but the folders of sandboxes whose monitor was killed, which cannot be removed before the next start
    until(lambda: not node.processes(), lambda: f"all processes have ended: {node.processes()}", 60)
    sweep_all(sandbox_config())
    assert node.left() == []


def _all_are_up(folder: Path, node: _Node) -> int:
    logs = [path.read_text() for path in folder.glob("w*.log")]
    assert node.supervisor.poll() is None
    assert not any("Traceback" in log for log in logs), "\n".join(logs)
    return sum("up w" in log for log in logs)


@pytest.mark.soak
def test_random_kills_leave_nothing_on_the_node(folder: Path) -> None:
    chance = random.Random(SEED)
    hits: Counter[str] = Counter()
    kinds = {"namespace": 5, "singularity": 1}
    node = _Node(folder, n_workers=2, kinds=kinds, comes_and_goes=True)
    others = {os.getpid(), node.supervisor.pid}
    try:
        until(lambda: len(sandboxes()) >= 4, "some sandboxes are up", 60)
        while hits.total() < KILLS:
            assert node.supervisor.poll() is None, "\n".join(log.read_text() for log in folder.glob("*.log"))
            there = node.processes(others)
            # a worker that is killed right at its start starts nothing that could be left
            if there.keys() <= {"worker"}:
                node.unblock()
                time.sleep(0.05)
                continue
            # each kind equally often, however many processes it has
            what = chance.choice(sorted(there))
            time.sleep(chance.uniform(0, 0.05))
            node.send_signal(
                chance.choice(there[what]), signal.SIGSTOP if chance.random() < STOPPED else signal.SIGKILL
            )
            hits[what] += 1
        assert len(hits) >= 4, hits
        # a stopped process is continued later
        node.unblock()
        until(lambda: len(sandboxes()) >= 4, "sandboxes come up again", 60)
    finally:
        node.kill()
    until(lambda: "worker" not in node.processes(), "the workers have ended with the supervisor")
    sweep_all(sandbox_config())
    until(lambda: not node.left(), lambda: f"nothing is left: {node.left()}")


def test_stopped_processes_end_with_their_worker(folder: Path) -> None:
    """Nothing sweeps here: leftovers would be permanent."""
    kinds = {"namespace": 1, "singularity": 1}
    node = _Node(folder, n_workers=1, kinds=kinds, comes_and_goes=False, kernels=1)
    try:
        until(lambda: _all_are_up(folder, node) >= 1, "the sandboxes are up", 60)
        there = node.processes()
        # including those that would resume the fork server; the watcher belongs to the node
        for pid in there["forked by the porter"]:
            if _parent(Path(f"/proc/{pid}")) in there["porter"]:
                node.send_signal(pid, signal.SIGKILL)
        stopped = {*there["porter"], *there["interpreter"]}
        for pid in stopped:
            node.send_signal(pid, signal.SIGSTOP)
        node.send_signal(there["worker"][0], signal.SIGKILL)
        until(lambda: not stopped & node.pids(), lambda: f"a worker takes along {stopped & node.pids()} of {there}")
        until(lambda: _all_are_up(folder, node) >= 2, "its successor's sandboxes are up", 60)
        # its children are orphaned by then, and the end of the worker is not that of their parent
        node.send_signal(node.processes()["porter"][0], signal.SIGKILL)
        there = node.processes()
        assert {"monitor", "runtime", "first process", "forked by the porter", "interpreter"} <= there.keys()
        for pid in node.pids():
            node.send_signal(pid, signal.SIGSTOP)
    finally:
        node.kill()
    until(lambda: not node.left(), lambda: f"nothing is left: {node.left()} of {there}")


def test_stopped_remover_resumes_after_its_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "state/folder").mkdir(parents=True)
    slow = tmp_path / "rm"
    slow.write_text(f'#!/bin/sh\nkill -STOP $$\nexec {shutil.which("rm")} "$@"\n')
    slow.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code = (
        f"from pathlib import Path; from workers.sandboxes.remove_tree import remove; remove(Path('{tmp_path}/state'))"
    )
    with python(code, PATH=path) as worker:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        try:
            until(lambda: any(_stat(Path("/proc", pid))[0] == "T" for pid in children.read_text().split()), "it stops")
        finally:
            worker.kill()
    until(lambda: not (tmp_path / "state").exists(), "it has removed what it was to")


def test_stopped_grader_ends_with_its_worker() -> None:
    code = "import asyncio; from workers.evaluators.grading import Grader; asyncio.run(Grader().score('', {}, '', 60))"
    with python(code) as worker:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")

        def graders() -> list[Process]:
            pids = map(int, children.read_text().split())
            words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
            # by its own arguments: until its exec a child has those of its worker, which begin alike
            ours = [sys.executable.encode(), b"workers.evaluators.grader"]
            return [
                Process(pid, started_at(pid)) for pid in words if {*ours} <= {*words[pid]} and words[pid][0] == ours[0]
            ]

        try:
            grader = until(graders, "it starts")[0]
            os.kill(grader.pid, signal.SIGSTOP)
        finally:
            worker.kill()
    until(lambda: not grader.alive(), "it has ended")


def test_sandbox_ends_with_its_killed_monitor(folder: Path) -> None:
    node = _Node(folder, n_workers=1, kinds={"namespace": 2, "singularity": 2}, comes_and_goes=False)
    try:
        until(lambda: _all_are_up(folder, node) >= 1, "the sandboxes are up", 60)
        records = sandboxes()
        assert len(records) == 4
        for record in records:
            node.send_signal(record.monitor.pid, signal.SIGKILL)
        until(lambda: not any(record.first.alive() for record in records), "the sandboxes end with their monitors")
    finally:
        node.kill()
    sweep_all(sandbox_config())
    until(lambda: not node.left(), lambda: f"nothing is left: {node.left()}")


def test_stopped_runtime_ends_with_its_killed_monitor(folder: Path) -> None:
    """Only its process group still identifies it."""
    node = _Node(folder, n_workers=1, kinds={"singularity": 2}, comes_and_goes=False)
    try:
        until(lambda: _all_are_up(folder, node) >= 1, "the sandboxes are up", 60)
        stopped = node.processes()["runtime"]
        for pid in stopped:
            node.send_signal(pid, signal.SIGSTOP)
        for record in sandboxes():
            node.send_signal(record.monitor.pid, signal.SIGKILL)
    finally:
        node.kill()
    sweep_all(sandbox_config())
    until(lambda: not node.left(), lambda: f"nothing is left: {node.left()} of {stopped}")


def test_leftovers_of_killed_node_are_swept_by_its_neighbour(folder: Path) -> None:
    """Nodes have separate folders in one parent, and hold their lock while they live."""

    def start_in(name: str) -> SandboxRecord:
        monkeypatch.setenv("FARM_SCRATCH", str(folder / "scratch" / name))
        settings.cache_clear()
        asyncio.run(NamespaceProvider().start("one", SandboxSpec()))
        (folder / "scratch" / name / "lock").touch()
        record = SandboxRecord.load(sandbox_config().sandboxes_folder / "one")
        assert record
        return record

    with pytest.MonkeyPatch.context() as monkeypatch:
        dead, alive = start_in("dead"), start_in("alive")
        os.kill(dead.monitor.pid, signal.SIGKILL)
        (folder / "scratch/dead/sandboxes/started").mkdir()
        with locked(folder / "scratch/alive/lock", "it lives"):
            monkeypatch.setenv("FARM_SCRATCH", str(folder / "scratch/own"))
            settings.cache_clear()
            assert sweep_dead_nodes(sandbox_config()) == ["dead"]
            assert alive.first.alive()
        assert sweep_dead_nodes(sandbox_config()) == ["alive"]
        assert not alive.first.alive()
    settings.cache_clear()
    assert not {"dead", "alive"} & {path.name for path in (folder / "scratch").iterdir()}

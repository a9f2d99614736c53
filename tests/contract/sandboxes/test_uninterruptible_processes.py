"""Sandboxes with processes in uninterruptible sleep, immune to SIGKILL, on a file system that hangs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from farm.records.request import SandboxLimits
from testkit.private_server import Missing
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.services.farms import until
from tests.services.servers.fuse import silent_mount, state_of
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.lifecycle.reaper import sweep
from workers.sandboxes.lifecycle.state import folder
from workers.sandboxes.processes.process_tree import children
from workers.sandboxes.sandbox import NodeSandbox

pytestmark = pytest.mark.parametrize("provider", ["namespace"], indirect=True)

Run = Callable[[Any], Any]
Start = Callable[..., Sandbox]
PLACE = "/tmp/silent"
SMALL = SandboxLimits(disk_mb=20)
WRITES = """
import time
with open("big", "wb") as file:
    while True:
        file.write(bytes(3 << 20))
        file.flush()
        time.sleep(0.1)
"""
EXECS = """
import os
os.open("/tmp/silent/held", os.O_RDONLY)
# on its way the descriptor is closed, which waits with the lock that all of the machine need who ask about this process
os.execv("/bin/sleep", ["sleep", "1000"])
"""
HOLDS = """
import os, time
os.open("/tmp/silent/held", os.O_RDONLY)
os.unlink("/tmp/silent/held")
print("up", flush=True)
time.sleep(1000)
"""


class HangingMount:
    """Mounts a file system that does not answer until `end`."""

    def __init__(self) -> None:
        self._servers = ExitStack()

    def mount(self, run: Run, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, NodeSandbox)
        if os.geteuid():
            pytest.skip("only root may mount something in a sandbox")
        sh(run, sandbox, f"mkdir {PLACE}")
        try:
            self._servers.enter_context(silent_mount(sandbox._record.first.pid, PLACE))
        except Missing as missing:
            absent(str(missing))

    def end(self) -> None:
        """Wake all sleepers."""
        self._servers.close()


@pytest.fixture
def hanging_mount() -> Iterator[HangingMount]:
    opened = HangingMount()
    yield opened
    opened.end()


def sh(run: Run, sandbox: Sandbox, script: str, timeout_s: float = 20) -> Any:
    return run(sandbox.exec(["bash", "-c", script], timeout_s=timeout_s))


def sleeper(run: Run, sandbox: Sandbox) -> int:
    """Return the pid, on the host, of a process that is immune to SIGKILL."""
    assert isinstance(sandbox, NodeSandbox)
    first = sandbox._record.first.pid
    sh(run, sandbox, f"cat {PLACE}/x >/dev/null 2>&1 </dev/null & sleep 0.2; kill -KILL $!")
    return until(lambda: next((pid for pid in children(first) if state_of(pid) == "D"), 0), "it sleeps")


def test_limits_hold_in_and_next_to_a_sandbox_with_hung_processes(
    run: Run, start: Start, hanging_mount: HangingMount
) -> None:
    sleeping, other = start(limits=SMALL), start(limits=SMALL)
    hanging_mount.mount(run, sleeping)
    run(sleeping.write_file("/workspace/holds.py", HOLDS.encode()))
    sh(run, sleeping, "python3 holds.py >out & until grep -q up out; do sleep 0.02; done")
    for sandbox in (other, sleeping):
        assert "disk" in run(sandbox.exec(["python3", "-c", WRITES], timeout_s=60)).limit, sandbox.sandbox_id


def test_uninterruptible_command_times_out(run: Run, start: Start, hanging_mount: HangingMount) -> None:
    sandbox = start()
    hanging_mount.mount(run, sandbox)
    run(sandbox.write_file("/workspace/execs.py", EXECS.encode()))
    shell = run(sandbox.open_shell())
    assert run(shell.run("python3 execs.py", 1)).timed_out
    assert run(shell.run("echo here", 20)).output == "here\n"
    run(shell.close())


def test_hung_sandboxes_are_swept_in_parallel(run: Run, start: Start, hanging_mount: HangingMount) -> None:
    config = sandbox_config()
    *sleeping, lively = sorted((start() for _ in range(3)), key=lambda sandbox: sandbox.sandbox_id)
    for sandbox in sleeping:
        hanging_mount.mount(run, sandbox)
    sleepers = [sleeper(run, sandbox) for sandbox in sleeping]
    monitors = [sandbox._record.monitor for sandbox in sleeping if isinstance(sandbox, NodeSandbox)]
    ours = ids(*sleeping, lively)
    others = [path.name for path in config.sandboxes_folder.iterdir() if path.name not in ours]
    with ThreadPoolExecutor(1) as threads:
        sweeping = threads.submit(sweep, config, lambda: others)
        until(lambda: not folder(config, lively.sandbox_id).exists(), "the last one is gone")
        assert all(monitor.alive() for monitor in monitors), "none of those before it was given up by then"
        assert set(sweeping.result()) == ids(*sleeping, lively)
    assert not any(folder(config, sandbox.sandbox_id).exists() for sandbox in sleeping)
    assert [state_of(pid) for pid in sleepers] == ["D", "D"]
    hanging_mount.end()
    until(lambda: not any(map(state_of, sleepers)), "nothing is left of them")


def ids(*sandboxes: Sandbox) -> set[str]:
    return {sandbox.sandbox_id for sandbox in sandboxes}


@pytest.mark.parametrize("direction", ["in", "out"])
def test_hung_transfer_can_be_cancelled(
    run: Run, start: Start, hanging_mount: HangingMount, tmp_path: Path, direction: str
) -> None:
    sandbox = start()
    hanging_mount.mount(run, sandbox)
    (tmp_path / "large").write_bytes(bytes(1 << 20))

    async def give_up() -> bool:
        going = sandbox.upload(tmp_path / "large", f"{PLACE}/x/y")
        if direction == "out":
            going.close()
            going = sandbox.download(f"{PLACE}/x", tmp_path / "new")
        transfer = asyncio.create_task(going)
        await asyncio.sleep(0.5)
        transfer.cancel()
        done, _ = await asyncio.wait([transfer], timeout=20)
        # else it would wait for its thread at the end of the test
        transfer.cancel()
        return bool(done)

    assert run(give_up())
    assert not (tmp_path / "new").exists()

"""Start and end sandboxes in every way: stop, and kill -9 of any of their processes at any moment.

`python -m benchmarks.cycles KIND IMAGE N` starts N sandboxes and waits, as a worker that is to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

from farm.errors import FarmError
from farm.records.request import SandboxSpec
from testkit.processes import tree
from testkit.scratch_folder import sandbox_config
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.lifecycle.reaper import sweep
from workers.sandboxes.lifecycle.state import SandboxRecord, folder
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.singularity import SingularityProvider

PROVIDERS: dict[str, type[SandboxProvider]] = {"singularity": SingularityProvider, "namespace": NamespaceProvider}
WIDTH = 4
_ENDS = ("stop", "monitor", "first_process", "starter", "all", "during_the_start")
_SWEEP_EVERY = 40
_WORK = (None, "true", "sleep 1000 & (setsid sleep 1000 &) ; echo > /tmp/file")


class Cycles:
    """Many cycles, `WIDTH` at a time; `ended` counts them by kind of end."""

    def __init__(self, provider: SandboxProvider, spec: SandboxSpec, seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self._provider = provider
        self._spec = spec
        self._random = random.Random(seed)
        self._wanted: set[str] = set()

    async def run(self, n: int) -> None:
        """Run n cycles, with a sweep now and then during others, and one at the end."""
        config = sandbox_config()
        todo = iter(range(n))

        async def some() -> None:
            for number in todo:
                await self._cycle()
                if number % _SWEEP_EVERY == 0:
                    await asyncio.to_thread(sweep, config, lambda: frozenset(self._wanted), 0.0)

        await asyncio.gather(*(some() for _ in range(WIDTH)))
        await asyncio.to_thread(sweep, config, lambda: (), 0.0)

    async def _cycle(self) -> None:
        sandbox_id = f"cycle-{uuid4().hex[:12]}"
        way = self._random.choice(_ENDS)
        # registered before it exists, or a sweep would treat it as abandoned
        self._wanted.add(sandbox_id)
        start = asyncio.ensure_future(self._provider.start(sandbox_id, self._spec))
        try:
            if way == "during_the_start":
                await asyncio.sleep(self._random.uniform(0, 0.06))
                _kill(_processes_of(sandbox_id), self._random)
            sandbox = await start
            await self._work(sandbox)
            if way in ("stop", "during_the_start"):
                await sandbox.stop()
            else:
                _kill_one(sandbox_id, way)
            self.ended[way] += 1
        except FarmError:
            # killed during its start or work, on purpose
            self.ended[f"{way}_and_failed"] += 1
        finally:
            self._wanted.discard(sandbox_id)

    async def _work(self, sandbox: Sandbox) -> None:
        command = self._random.choice(_WORK)
        if command is not None:
            shell = await sandbox.open_shell()
            await shell.run(command, 30)
            await shell.close()


def _kill_one(sandbox_id: str, way: str) -> None:
    record = SandboxRecord.load(folder(sandbox_config(), sandbox_id))
    assert record, "a running sandbox has a record"
    starters = [pid for pid in tree(record.monitor.pid) if pid not in (record.monitor.pid, record.first.pid)]
    chosen = {"monitor": [record.monitor.pid], "first_process": [record.first.pid], "starter": starters[:1]}
    for pid in chosen.get(way, [record.monitor.pid, *starters, record.first.pid]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes_of(sandbox_id: str) -> list[int]:
    """Return our descendants in the sandbox's folder: its monitor, and the processes that it has started so far."""
    place, result = folder(sandbox_config(), sandbox_id), []
    for pid in tree(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink() == place:
                result.append(pid)
    return result


def _kill(pids: list[int], chance: random.Random) -> None:
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)


def killed_worker(kind: str, image: str, n: int, seed: int) -> int:
    """Start a worker with n sandboxes and kill it -9 at some moment. Returns how many had started. Blocks."""
    after = random.Random(seed).randint(1, n)
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cycles", kind, image, str(n)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert worker.stdout
    with worker.stdout as lines:
        n_up = sum(1 for _, line in zip(range(after), lines, strict=False) if line)
        worker.kill()
        worker.wait()
    return n_up


async def _be_a_worker(kind: str, image: str, n: int) -> None:
    provider = PROVIDERS[kind]()
    started: list[Sandbox] = []
    for _ in range(n):
        started.append(await provider.start(f"doomed-{uuid4().hex[:12]}", SandboxSpec(image=image)))
        print(started[-1].sandbox_id, flush=True)
    time.sleep(600)  # noqa: ASYNC251 - until it is killed


if __name__ == "__main__":
    asyncio.run(_be_a_worker(sys.argv[1], sys.argv[2], int(sys.argv[3])))

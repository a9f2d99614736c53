"""A small model of a node's processes, for tests that kill them: a supervisor with workers, and busy sandboxes.

`python -m tests.services.crowd supervisor JSON`. The supervisor holds the lifeline and sweeps, and its workers die with
it, as in `farm node`; a seed determines what they do with their sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from farm.embedded.child_process import ChildProcess
from farm.errors import FarmError
from farm.records.request import SandboxLimits, SandboxSpec
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.lifecycle.reaper import sweep
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.singularity import SingularityProvider

PROVIDERS = {"namespace": NamespaceProvider, "singularity": SingularityProvider}
FURNISH = """
mkdir -p $(printf 'deep/%.0s' {1..40}) && mkdir -m 0 closed && mkfifo pipe && touch -d 1970-01-01 old
setsid bash -c 'trap "" TERM HUP INT; exec 9>/proc/1/fd/0; sleep 7777' </dev/null >/dev/null 2>&1 &
setsid python3 -c '
import os, socket
s = socket.socket(socket.AF_UNIX); s.bind("/run/farm/service"); s.listen()
os.fork() or os.setsid()
while True: s.accept()
' </dev/null >/dev/null 2>&1 &
"""
"""Commands that leave daemons in a sandbox, one of which keeps the first process's input open, folders and sockets."""
AT_A_TIME = 4


class _Worker:
    """Keeps so many sandboxes of each kind, or starts and stops them repeatedly."""

    def __init__(self, name: str, plan: dict[str, Any]) -> None:
        self._name = name
        self._random = random.Random(f"{plan['seed']} {name}")
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._kinds = [kind for kind, n in plan["kinds"].items() for _ in range(n)]
        self._comes_and_goes = plan["comes_and_goes"]
        self._kernels = plan.get("kernels", 0.15)

    async def run(self) -> None:
        await asyncio.gather(*(self._keep(kind, index) for index, kind in enumerate(self._kinds)))
        print("up", self._name, flush=True)
        await asyncio.Event().wait()

    async def _keep(self, kind: str, index: int) -> None:
        provider = PROVIDERS[kind]()
        for n in range(1_000_000 if self._comes_and_goes else 1):
            sandbox_id = f"{self._name}.{index}.{n}"
            spec = SandboxSpec(limits=SandboxLimits(n_processes=100), env={"FARM_TEST": str(settings().scratch)})
            with contextlib.suppress(FarmError, OSError) if self._comes_and_goes else contextlib.nullcontext():
                async with self._turns:
                    sandbox = await self._start(provider.start(sandbox_id, spec))
                    if sandbox:
                        await self._furnish(sandbox)
                if sandbox and self._comes_and_goes:
                    await self._use(sandbox)

    async def _start(self, starting: Any) -> Sandbox | None:
        """Start a sandbox; sometimes its rollout is cancelled during the start."""
        limit_s = self._random.uniform(0, 0.2) if self._comes_and_goes and self._random.random() < 0.2 else None
        try:
            async with asyncio.timeout(limit_s):
                return await starting  # type: ignore[no-any-return]
        except TimeoutError:
            return None

    async def _furnish(self, sandbox: Sandbox) -> None:
        await sandbox.exec(["bash", "-c", FURNISH], timeout_s=20)
        shell = await sandbox.open_shell()
        await shell.run("sleep 8888 & cd /tmp", 20)
        if self._random.random() < self._kernels:
            kernel = await sandbox.open_kernel()
            await kernel.run("import subprocess; subprocess.Popen(['sleep', '9999'], start_new_session=True)", 20)

    async def _use(self, sandbox: Sandbox) -> None:
        for _ in range(self._random.randrange(4)):
            await sandbox.exec(["bash", "-c", "sleep 0.05; ls -R / | head -c 100000"], timeout_s=0.3)
        # sometimes it is left to the sweep
        if self._random.random() < 0.8:
            await sandbox.stop()


class _Supervisor:
    """Starts the workers, and restarts killed ones; sweeps sandboxes of dead workers."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._read_end, self._write_end = os.pipe()
        self._workers: dict[str, ChildProcess] = {}
        self._n_started = 0

    def run(self) -> None:
        while True:
            for name in [name for name, child in self._workers.items() if not child.running]:
                del self._workers[name]
            while len(self._workers) < self._plan["n_workers"]:
                self._start()
            sweep(
                sandbox_config(), self._sandboxes_of_workers, starting_s=2.0 if self._plan["comes_and_goes"] else 120.0
            )
            time.sleep(0.1)

    def _start(self) -> None:
        name = f"w{self._n_started}"
        self._n_started += 1
        argv = [sys.executable, "-m", "tests.services.crowd", name, json.dumps(self._plan)]
        env = {**os.environ, "FARM_LIFELINE_FD": str(self._read_end)}
        log = settings().scratch.parent / f"{name}.log"
        self._workers[name] = ChildProcess(argv, env=env, log=log, pass_fds=[self._read_end])

    def _sandboxes_of_workers(self) -> set[str]:
        names = {path.name for path in sandbox_config().sandboxes_folder.iterdir()}
        return {name for name in names if name.partition(".")[0] in self._workers}


def main() -> None:
    role, plan = sys.argv[1], json.loads(sys.argv[2])
    os.chdir(Path(__file__).parents[2])
    if role == "supervisor":
        _Supervisor(plan).run()
    else:
        asyncio.run(_Worker(role, plan).run())


if __name__ == "__main__":
    main()

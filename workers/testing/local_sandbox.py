"""A sandbox without isolation: a folder of this machine, with the real shell and the real kernel.

For tests of handlers, tools and agents where no sandbox can run, or starting one costs too much. It keeps the promises
of the group `surface` (`python -m workers.conformance workers.testing.local_sandbox:LocalProvider --group surface`),
and no others: commands run on this machine, see its files, processes and network with its user's rights, and have no
limits. Never give it a model's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from farm.errors import SandboxError
from farm.records.request import SandboxLimits, SandboxSpec
from workers.conformance.outside import processes_with
from workers.plugins.interfaces import ExecResult, Kernel, Sandbox, Shell
from workers.sandboxes.kernel.kernel import open_kernel
from workers.sandboxes.processes.command_arguments import check_words
from workers.sandboxes.processes.limit_events import LimitEvents
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import Collector, SandboxProcess
from workers.sandboxes.shell.shell import BashShell
from workers.testing.local_files import LocalFiles
from workers.testing.local_process import started

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget

_MEMBER = "LOCAL_SANDBOX"
MAX_OUTPUT = 10_000_000
"""Maximum bytes kept of each output stream of a command."""


class LocalSandbox:
    """A `workers.plugins.interfaces.Sandbox` in a folder of this machine.

    It uses a temporary folder, or `place`, where another process may have started it. For reading, writing and copying
    files, paths below the spec's `workdir` are mapped to its working folder; other paths outside it are refused.
    Commands see this machine's paths: use relative ones.
    """

    def __init__(self, sandbox_id: str, spec: SandboxSpec, place: Path | None = None) -> None:
        self.sandbox_id = sandbox_id
        self._place = place or Path(tempfile.mkdtemp(prefix="local-sandbox-"))
        # No other sandbox's mark begins with this one.
        self._mark = f"{self._place}/"
        self.socket_folder = self._place / "sockets"
        self.workdir = str(self._place / "workdir")
        for folder in (self.socket_folder, Path(self.workdir), self._place / "home"):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._spec = spec
        self._files = LocalFiles(Path(self.workdir), spec.workdir)
        self.stopped = False

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a command's environment; one variable marks its child processes, which are killed at the end."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"PATH": path, "HOME": str(self._place / "home"), "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
        return {**own, **self._spec.env, **(more or {}), _MEMBER: self._mark}

    def notices(self) -> LimitEvents:
        """Return events that never occur: there are no limits."""
        return LimitEvents(self._place)

    def target(self, limits: SandboxLimits | None = None) -> JoinTarget:
        """Raise SandboxError: there is nothing to join."""
        raise SandboxError(f"sandbox {self.sandbox_id} is local: nothing can be moved into it")

    def _check(self) -> None:
        if self.stopped or not self._place.is_dir():
            raise SandboxError(f"sandbox {self.sandbox_id} is stopped")

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        terminal: bool = False,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxProcess:
        """Implement `workers.sandboxes.processes.entry.Entry.start`."""
        check_words(argv, env, cwd)
        self._check()
        answers = started(argv, env, fds, os.path.join(self.workdir, cwd or ""), terminal)  # noqa: PTH118
        return await SandboxProcess.started(answers, self.sandbox_id)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Implement `Sandbox.exec`; `limits` are ignored."""
        mark = new_tag()
        with contextlib.ExitStack() as resources:
            streams = [Collector(MAX_OUTPUT), Collector(MAX_OUTPUT)]
            with contextlib.ExitStack() as result:
                fds = {0: result.enter_context(_written(stdin))}
                for number, stream in enumerate(streams, start=1):
                    resources.callback(stream.close)
                    result.callback(stream.close_write_end)
                    fds[number] = stream.write_end
                child = await self.start(argv, env=self.environment({**(env or {}), MARK: mark}), fds=fds, cwd=cwd)
            with child:
                code = await _code(child, timeout_s, mark)
            self._check()
            out, err = (stream.finish() for stream in streams)
            return ExecResult(code, out, err, timed_out=code is None)

    async def open_shell(self) -> Shell:
        self._check()
        return await BashShell.open(self)

    async def open_kernel(self, name: str = "") -> Kernel:
        self._check()
        return await open_kernel(self, name)

    async def read_file(self, path: str) -> bytes:
        self._check()
        return self._files.read(path)

    async def write_file(self, path: str, data: bytes) -> None:
        self._check()
        self._files.write(path, data)

    async def upload(self, source: Path, path: str) -> None:
        self._check()
        self._files.upload(source, path)

    async def download(self, path: str, target: Path) -> None:
        self._check()
        self._files.download(path, target)

    async def stop(self) -> None:
        """Kill what it started, and remove its folder."""
        self.stopped = True
        await asyncio.to_thread(_kill_all, f"{_MEMBER}={self._mark}")
        shutil.rmtree(self._place, ignore_errors=True)


class LocalProvider:
    """A `workers.plugins.interfaces.SandboxProvider`. It can only attach to sandboxes that it started itself."""

    kind: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._running: dict[str, LocalSandbox] = {}

    def missing(self) -> str:
        return ""

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        if sandbox_id in self._running and not self._running[sandbox_id].stopped:
            raise SandboxError(f"sandbox {sandbox_id}: a sandbox with this id already exists")
        self._running[sandbox_id] = LocalSandbox(sandbox_id, spec)
        return self._running[sandbox_id]

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        local_sandbox = self._running.get(sandbox_id)
        if local_sandbox is None or local_sandbox.stopped:
            raise SandboxError(f"sandbox {sandbox_id}: no local sandbox with this id is running")
        return local_sandbox


@contextlib.contextmanager
def _written(data: bytes) -> Iterator[int]:
    """Yield a descriptor to read `data` from."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


async def _code(child: SandboxProcess, timeout_s: float, mark: str) -> int | None:
    """Return a command's exit code; None at its time limit. All that it started is killed then, or on cancellation."""
    try:
        async with asyncio.timeout(timeout_s):
            return await child.wait()
    except BaseException as error:
        child.kill()
        kill_tagged(mark)
        if isinstance(error, TimeoutError):
            return None
        raise


def _kill_all(text: str) -> None:
    """SIGKILL all processes marked with a text, until none is left, as they may fork meanwhile. Blocks."""
    while pids := processes_with(text):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

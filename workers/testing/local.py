"""A sandbox that is none: a folder of this machine, with the real shell and the real kernel in it.

For tests of handlers, tools and agents where no sandbox can run, or where starting one costs too much. It keeps the
promises of the group `surface` (`python -m workers.testing.promises workers.testing.local:LocalProvider --group
surface`), and none of the others: commands are this machine's, see its files, processes and network with its user's
rights, and meet no limits. Never give it a model's commands.
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
from farm.request import SandboxLimits, SandboxSpec
from workers.interfaces import ExecResult, Kernel, Sandbox, Shell
from workers.sandboxes.child import Child, Collector
from workers.sandboxes.kernel import open_kernel
from workers.sandboxes.marked import MARK, kill_carriers, new_mark
from workers.sandboxes.notices import Notices
from workers.sandboxes.shell import BashShell
from workers.testing.local_files import LocalFiles
from workers.testing.local_process import started
from workers.testing.promises.outside import processes_with

if TYPE_CHECKING:
    from workers.sandboxes.joining import Target

_MEMBER = "LOCAL_SANDBOX"
MAX_OUTPUT = 10_000_000
"""Bytes kept of each stream of a command."""


class LocalSandbox:
    """See `workers.interfaces.Sandbox`.

    Its working folder is a temporary one. Where files are read, written or copied, paths below the spec's `workdir` are
    paths in it, and others outside of it are refused. In commands all paths are this machine's: use relative ones.
    """

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        self.sandbox_id = sandbox_id
        self._place = Path(tempfile.mkdtemp(prefix="local-sandbox-"))
        self.socket_folder = self._place / "sockets"
        self.workdir = str(self._place / "workdir")
        for folder in (self.socket_folder, Path(self.workdir), self._place / "home"):
            folder.mkdir(mode=0o700)
        self._spec = spec
        self._files = LocalFiles(Path(self.workdir), spec.workdir)
        self.stopped = False

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of every command; by one of its variables, what was started is found when this ends."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"PATH": path, "HOME": str(self._place / "home"), "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
        return {**own, **self._spec.env, **(more or {}), _MEMBER: self._place.name}

    def notices(self) -> Notices:
        """There are no limits to be told of."""
        return Notices(self._place)

    def target(self, limits: SandboxLimits | None = None) -> Target:
        """There is nothing to join."""
        raise SandboxError(f"sandbox {self.sandbox_id} is local: nothing can be moved into it")

    def _check(self) -> None:
        if self.stopped:
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
    ) -> Child:
        """See `workers.sandboxes.entry.Entry.start`."""
        self._check()
        answers = started(argv, env, fds, os.path.join(self.workdir, cwd or ""), terminal)  # noqa: PTH118
        return await Child.started(answers, self.sandbox_id)

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
        """See `Sandbox.exec`; `limits` are not looked at."""
        mark = new_mark()
        with contextlib.ExitStack() as resources:
            streams = [Collector(MAX_OUTPUT), Collector(MAX_OUTPUT)]
            with contextlib.ExitStack() as given:
                fds = {0: given.enter_context(_written(stdin))}
                for number, stream in enumerate(streams, start=1):
                    resources.callback(stream.close)
                    given.callback(stream.close_write_end)
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
        """End what it started, and remove its folder."""
        self.stopped = True
        await asyncio.to_thread(_kill_all, f"{_MEMBER}={self._place.name}")
        shutil.rmtree(self._place, ignore_errors=True)


class LocalProvider:
    """See `workers.interfaces.SandboxProvider`. What one starts, only the same one can attach to."""

    kind: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._running: dict[str, LocalSandbox] = {}

    def missing(self) -> str:
        return ""

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        if sandbox_id in self._running and not self._running[sandbox_id].stopped:
            raise SandboxError(f"sandbox {sandbox_id}: there is one of this id already")
        self._running[sandbox_id] = LocalSandbox(sandbox_id, spec)
        return self._running[sandbox_id]

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        found = self._running.get(sandbox_id)
        if found is None or found.stopped:
            raise SandboxError(f"sandbox {sandbox_id}: no local sandbox of this id runs")
        return found


@contextlib.contextmanager
def _written(data: bytes) -> Iterator[int]:
    """A descriptor to read `data` from."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


async def _code(child: Child, timeout_s: float, mark: str) -> int | None:
    """How a command ended; None at its time limit, with all it started killed, as they are on cancellation."""
    try:
        async with asyncio.timeout(timeout_s):
            return await child.wait()
    except BaseException as error:
        child.kill()
        kill_carriers(mark)
        if isinstance(error, TimeoutError):
            return None
        raise


def _kill_all(text: str) -> None:
    """SIGKILL to the processes that carry a text, again until none is left: some may fork meanwhile. Blocks."""
    while pids := processes_with(text):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

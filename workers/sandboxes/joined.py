"""A running sandbox as its users see it. Both kinds are the same here: a first process whose namespaces are joined."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from farm.errors import SandboxError, ToolError
from farm.request import SandboxSpec
from workers.interfaces import ExecResult
from workers.sandboxes.child import Child, Collector
from workers.sandboxes.kernel import IPythonKernel
from workers.sandboxes.marked import MARK, kill_carriers, new_mark
from workers.sandboxes.owner import drop_privileges
from workers.sandboxes.record import Record, folder
from workers.sandboxes.remove import remove
from workers.sandboxes.shell import BashShell

MAX_OUTPUT = 10_000_000
"""Bytes kept of each stream of a command; the rest is read and dropped."""
FILE_S = 60.0
STOP_S = 5.0

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}

_ENTER = 'ulimit -c 0; ulimit -u "$1"; cd -- "$0" || exit 126; shift; exec "$@"'
_WRITE = 'case $0 in */*) mkdir -p -- "${0%/*}/" || exit;; esac; exec cat >"$0"'


@cache
def _nsenter() -> str:
    path = shutil.which("nsenter")
    if path is None:
        raise SandboxError("this node has no `nsenter`: install util-linux")
    return path


class JoinedSandbox:
    """A sandbox of this node, started by whichever process; entered with `nsenter` for each command."""

    def __init__(self, record: Record, spec: SandboxSpec, bin_folders: Sequence[str] = ()) -> None:
        self.sandbox_id = record.sandbox_id
        self._record = record
        self._spec = spec
        self._search_path = ":".join([*bin_folders, SEARCH_PATH])

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of every command: chosen, never the worker's."""
        return {**ENVIRONMENT, "PATH": self._search_path, **self._spec.env, **(more or {})}

    def enter(self, argv: Sequence[str], cwd: str | None = None) -> list[str]:
        """The host command that runs `argv` in the sandbox. Raises SandboxError if the sandbox is gone."""
        self._check_alive()
        return [
            *drop_privileges(),
            *(_nsenter(), "-t", str(self._record.first.pid)),
            *("-U", "--preserve-credentials", "-m", "-p", "-n", "-i", "-u", "-C", "--"),
            *("bash", "--norc", "--noprofile", "-c", _ENTER, cwd or self._spec.workdir, str(self._spec.max_processes)),
            *argv,
        ]

    def _check_alive(self) -> None:
        if not self._record.first.alive():
            raise SandboxError(f"sandbox {self.sandbox_id} is gone: its first process has ended")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run one command to its end, or kill it and what it started after `timeout_s`. See `Sandbox.exec`.

        A command in the background that outlives its parent stays; its later output is lost.
        """
        mark = new_mark()
        with contextlib.ExitStack() as resources:
            out, err = Collector(MAX_OUTPUT), Collector(MAX_OUTPUT)
            resources.callback(out.close)
            resources.callback(err.close)
            try:
                source = resources.enter_context(_memory_file(stdin))
                command = self.enter(argv, cwd)
                environment = {**self.environment(env), MARK: mark}
                child = Child(command, env=environment, stdin=source, stdout=out.write_end, stderr=err.write_end)
                resources.enter_context(child)
            finally:
                os.close(out.write_end)
                os.close(err.write_end)
            try:
                async with asyncio.timeout(timeout_s):
                    code: int | None = await child.wait()
            except TimeoutError:
                code = None
            except BaseException:
                kill_carriers(mark)
                raise
            if code is None:
                child.kill()
                await asyncio.to_thread(kill_carriers, mark)
            elif code != 0:
                self._check_alive()
            return ExecResult(code, out.finish(), err.finish(), timed_out=code is None)

    async def open_shell(self) -> BashShell:
        return await BashShell.open(self)

    async def open_kernel(self) -> IPythonKernel:
        return await IPythonKernel.open(self)

    async def read_file(self, path: str) -> bytes:
        """See `Sandbox.read_file`; from inside, so that a link leads where the policy could have gone itself."""
        result = await self.exec(["cat", "--", path], timeout_s=FILE_S)
        if result.code != 0:
            raise ToolError(_complaint(result, f"{path} cannot be read"))
        return result.stdout

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Sandbox.write_file`."""
        result = await self.exec(["bash", "-c", _WRITE, path], timeout_s=FILE_S, stdin=data)
        if result.code != 0:
            raise ToolError(_complaint(result, f"{path} cannot be written"))

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        await asyncio.to_thread(end, self._record)


def end(record: Record) -> None:
    """Let the monitor end the sandbox, or end it without one; harmless if repeated. Blocks."""
    if not record.monitor.end(signal.SIGTERM, STOP_S):
        record.monitor.end(signal.SIGKILL, STOP_S)
    record.first.end(signal.SIGKILL, STOP_S)
    state = folder(record.sandbox_id)
    found = Record.load(state)
    # a sandbox of the same id that was started since is not ours to remove
    if state.exists() and (found is None or found == record):
        remove(state)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    """A descriptor to read `data` from; in memory, as a pipe would need someone to keep filling it."""
    descriptor = os.memfd_create("stdin") if data else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with open(descriptor, "wb" if data else "rb", closefd=False) as file:
            if data:
                file.write(data)
        if data:
            os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _complaint(result: ExecResult, otherwise: str) -> str:
    last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return last[0].partition(": ")[2] if last else otherwise

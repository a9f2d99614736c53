"""A sandbox without isolation: a folder of this machine, with the real shell and the real kernel.

For tests of handlers, tools and agents where no sandbox can run, or starting one costs too much. It keeps the promises
of the group `surface` (`python -m workers.conformance workers.testing.local_sandbox:LocalProvider --group surface`),
and no others: commands run on this machine, see its files, processes and network with its user's rights, and have no
limits. Never give it a model's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from farm.errors import SandboxError, ToolError
from farm.records.request import SandboxLimits, SandboxSpec
from farm.settings import settings
from workers.config import SandboxConfig
from workers.conformance.outside import processes_with
from workers.plugins.interfaces import ExecResult, Kernel, Sandbox, Shell
from workers.sandboxes.kernel.kernel import open_kernel
from workers.sandboxes.processes.fork_client import ForkReplies
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import Collector, LimitEvents, SandboxProcess, check_words, memory_file
from workers.sandboxes.shell.shell import BashShell

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget

MAX_FILE = 100_000_000
_RUN = 'cd -- "$0" || exit 126; exec -- "$@"'
_HIGH = 300
_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_MEMBER = "LOCAL_SANDBOX"
MAX_OUTPUT = 10_000_000
"""Maximum bytes kept of each output stream of a command."""


def _with_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _unused(target: Path) -> Path:
    if target.exists() or target.is_symlink():
        raise ToolError(f"{target} already exists on the node")
    return target


def _check(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ToolError(f"{path}: {'Is a directory' if stat.S_ISDIR(status.st_mode) else 'Not a regular file'}")
    if status.st_size > MAX_FILE:
        raise ToolError(f"{path}: File is larger than {MAX_FILE // 1_000_000} MB")


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder; within a folder, skip links that lead out of it, devices and sockets."""
    if not source.is_dir():
        if not source.is_file():
            raise ToolError(
                f"{source.name}: {'Not a regular file' if source.exists() else 'No such file or directory'}"
            )
        shutil.copy2(source, target)
        return
    top = source.resolve()

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not _may_be_copied(Path(folder, name), top)]

    shutil.copytree(top, target, symlinks=True, ignore=left_out)


def _may_be_copied(path: Path, top: Path) -> bool:
    if path.is_symlink():
        return not path.readlink().is_absolute() and Path(os.path.realpath(path)).is_relative_to(top)
    return path.is_dir() or path.is_file()


def started(
    argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], cwd: str, terminal: bool
) -> ForkReplies:
    """Start a program in its own session; send its pid, with a pidfd, then its exit code.

    `fds` maps the program's descriptors to ours, which may be closed on return; with `terminal`, descriptor 0 is its
    controlling terminal.
    """
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shell = ["bash", "--norc", "--noprofile", "-c", _RUN, cwd, *argv]
    try:
        pid = _spawn(shell, env, fds, terminal)
    except (OSError, ValueError) as error:
        # The message of a shell.
        if 2 in fds:
            os.write(fds[2], f"{argv[0][:100]}: {error}\n".encode(errors="surrogateescape"))
        pid = _spawn(["bash", "-c", "exit 126"], env, {}, False)
    threading.Thread(target=_watch, args=(pid, os.pidfd_open(pid), child_end), daemon=True).start()
    return ForkReplies(own_end)


def _spawn(argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], terminal: bool) -> int:
    actions: list[tuple[Any, ...]] = []
    with contextlib.ExitStack() as moved:
        for number, descriptor in fds.items():
            # First move them out of each other's way.
            high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            moved.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, number))
        actions += [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2) if n not in fds]
        actions += [(os.POSIX_SPAWN_CLOSE, n) for n in _inherited() if n > 2 and n not in fds]
        if terminal:
            # The first terminal that a session leader opens becomes its controlling terminal.
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.ttyname(fds[0]), os.O_RDWR, 0))
        return os.posix_spawnp(argv[0], list(argv), env, file_actions=actions, setsid=True, setsigdef=_SIGNALS)


def _inherited() -> Iterator[int]:
    """Yield the inheritable descriptors that this process was started with."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(entry.name)):
                yield int(entry.name)


def _watch(pid: int, pidfd: int, answer: socket.socket) -> None:
    """In a thread: report a child's pid, wait for it, report its end. The reader may have closed."""
    with answer, contextlib.suppress(OSError):
        try:
            socket.send_fds(answer, [json.dumps({"pid": pid}).encode()], [pidfd])
        finally:
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer.send(json.dumps({"code": code}).encode())


class LocalSandbox:
    """A `workers.plugins.interfaces.Sandbox` in a folder of this machine.

    It uses a temporary folder, or `root`, where another process may have started it. For reading, writing and copying
    files, paths below the spec's `workdir` are mapped to its working folder; other paths outside it are refused.
    Commands see this machine's paths: use relative ones.
    """

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path | None = None) -> None:
        self.config = SandboxConfig.of(settings())
        self.sandbox_id = sandbox_id
        self._root = root or Path(tempfile.mkdtemp(prefix="local-sandbox-"))
        # No other sandbox's mark begins with this one.
        self._mark = f"{self._root}/"
        self.socket_folder = self._root / "sockets"
        self.workdir = str(self._root / "workdir")
        for folder in (self.socket_folder, Path(self.workdir), self._root / "home"):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._spec = spec
        self._folder = Path(self.workdir).resolve()
        self.stopped = False

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a command's environment; one variable marks its child processes, which are killed at the end."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"PATH": path, "HOME": str(self._root / "home"), "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
        return {**own, **self._spec.env, **(more or {}), _MEMBER: self._mark}

    def notices(self) -> LimitEvents:
        """Return events that never occur: there are no limits."""
        return LimitEvents(self._root)

    def target(self, limits: SandboxLimits | None = None) -> JoinTarget:
        """Raise SandboxError: there is nothing to join."""
        raise SandboxError(f"sandbox {self.sandbox_id} is local: nothing can be moved into it")

    def _check(self) -> None:
        if self.stopped or not self._root.is_dir():
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
        """Implement `workers.sandboxes.processes.sandbox_process.SandboxEntry.start`."""
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
            with contextlib.ExitStack() as child_files:
                fds = {0: child_files.enter_context(memory_file(stdin))}
                for number, stream in enumerate(streams, start=1):
                    resources.callback(stream.close)
                    child_files.callback(stream.close_write_end)
                    fds[number] = stream.write_end
                child = await self.start(argv, env=self.environment({**(env or {}), MARK: mark}), fds=fds, cwd=cwd)
            with contextlib.closing(child):
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

    @contextmanager
    def _at(self, path: str) -> Iterator[Path]:
        """Yield a path's location on this machine, and translate errors there. ToolError if it is outside the sandbox.

        Relative paths start in the working folder; those below the spec's `workdir`, which need not exist, do, too.
        """
        self._check()
        if not path or "\0" in path:
            raise ToolError(f"{path!r}: Not a path")
        alias = self._spec.workdir
        relative = Path(path).relative_to(alias) if Path(path).is_relative_to(alias) else Path(path)
        # An absolute path replaces the folder in the join.
        location = self._folder / relative
        if not Path(os.path.normpath(location)).is_relative_to(self._folder):
            raise ToolError(f"{path}: No such file or directory in a local sandbox, which has only its working folder")
        try:
            yield location
        except shutil.Error as error:
            raise ToolError(f"{path}: {error}") from error
        except (OSError, RecursionError) as error:
            raise ToolError(f"{path}: {getattr(error, 'strerror', None) or error}") from error

    async def read_file(self, path: str) -> bytes:
        with self._at(path) as location, os.fdopen(os.open(location, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _check(path, os.fstat(file.fileno()))
            return file.read()

    async def write_file(self, path: str, data: bytes) -> None:
        with self._at(path) as location:
            descriptor = os.open(_with_parent(location), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                _check(path, os.fstat(descriptor))
                file.truncate()
                file.write(data)

    async def upload(self, source: Path, path: str) -> None:
        with self._at(path) as location:
            _copy(source, _with_parent(location))

    async def download(self, path: str, target: Path) -> None:
        with self._at(path) as location:
            _copy(location, _unused(target))

    async def stop(self) -> None:
        """Kill what it started, and remove its folder."""
        self.stopped = True
        await asyncio.to_thread(_kill_all, f"{_MEMBER}={self._mark}")
        shutil.rmtree(self._root, ignore_errors=True)


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

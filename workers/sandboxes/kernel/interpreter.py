"""One interpreter process in a sandbox, with a socket for cells and a pipe for output.

It is forked from a zygote and joins the sandbox if the sandbox has the farm's Python; otherwise it is started inside.
Its output is read continuously in bounded memory, so it survives the end of the process.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import sys
import termios
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.kernel import cell_protocol
from workers.sandboxes.kernel.python_runtime import BOOTSTRAP, kernel_folder
from workers.sandboxes.kernel.zygote_pool import Zygote, ZygoteKind, zygote_pool
from workers.sandboxes.processes.command_output import CommandOutput
from workers.sandboxes.processes.sandbox_process import OutputPipe, SandboxEntry

log = logging.getLogger(__name__)

Frame: TypeAlias = tuple[dict[str, Any], bytes]
_FRAME_CHUNK = 1 << 18
_MAX_UNREAD = 64
"""Maximum number of unread frames. An interpreter sends one for each cell."""

START_S = 90.0
_POLL_S = 0.005
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
_MAX_ERROR = 200

_BURST = 64_000_000
_PORTION = 1_000_000
_PERIOD_S = 0.01
"""Pause between portions of a cell's output after the burst: endless output blocks its writer, not the worker."""
_CHUNK = 65_536


class PeerGone(Exception):
    """The process at the other end has ended or violates the protocol."""


class FrameConnection:
    """The worker's end of an interpreter's socket, on the event loop. Only one call may wait for a frame at a time.

    The policy can forge messages, so their size is limited and malformed frames are rejected here.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._connection.setblocking(False)
        self._data = bytearray()
        self._unread: deque[Frame] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._descriptors: list[int] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._gone = False
        self._loop.add_reader(connection, self._read)

    def accept_descriptors(self) -> list[int]:
        """Accept a descriptor with the next bytes. The list has it once they have arrived; the caller owns it."""
        self._descriptors = []
        return self._descriptors

    def send(self, head: Mapping[str, Any], body: bytes) -> None:
        """Send a frame, in the background if it is long. `next` reports a closed connection, `send` does not."""
        data = cell_protocol.packed(head, body)
        try:
            n_sent = self._connection.send(data)
        except BlockingIOError:
            n_sent = 0
        except OSError:
            return self._end()
        if n_sent < len(data):
            self._sending = self._loop.create_task(self._send_rest(data[n_sent:]))

    async def _send_rest(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._connection, data)
        except OSError:
            self._end()

    async def next(self, seconds: float) -> Frame | None:
        """Return the next frame; None if none arrives within `seconds`. Raises PeerGone."""
        if not self._unread and not self._gone:
            self._woken = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        if self._unread:
            return self._unread.popleft()
        if self._gone:
            raise PeerGone
        return None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _read(self) -> None:
        try:
            if self._descriptors is None:
                data = self._connection.recv(_FRAME_CHUNK)
            else:
                data, descriptors, _, _ = socket.recv_fds(self._connection, _FRAME_CHUNK, 1)
                self._descriptors += descriptors
                self._descriptors = None
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._end()
        self._data += data
        try:
            self._parse()
        except PeerGone:
            self._end()

    def _parse(self) -> None:
        while len(self._data) >= cell_protocol.HEADER.size:
            n_head, n_body = cell_protocol.HEADER.unpack_from(self._data)
            if (
                n_head > cell_protocol.MAX_HEAD
                or n_body > cell_protocol.MAX_IMAGE_BYTES
                or len(self._unread) == _MAX_UNREAD
            ):
                raise PeerGone
            start = cell_protocol.HEADER.size + n_head
            if len(self._data) < start + n_body:
                return
            head = _object(bytes(self._data[cell_protocol.HEADER.size : start]))
            self._unread.append((head, bytes(self._data[start : start + n_body])))
            del self._data[: start + n_body]
            self._wake()

    def _end(self) -> None:
        self._gone = True
        self._loop.remove_reader(self._connection)
        self._wake()

    def close(self) -> None:
        """Close the connection. Harmless when repeated."""
        if self._connection.fileno() < 0:
            return
        if self._sending is not None:
            self._sending.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone from error
    if not isinstance(value, dict):
        raise PeerGone
    return value


@dataclass(frozen=True, slots=True)
class Program:
    """An interpreter's program: a module of the kernels' folder; `on_farm_python` or on the sandbox's Python."""

    module: str
    on_farm_python: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a cell: the name of the error, and pairs of media type and image."""

    error: str
    images: tuple[tuple[str, bytes], ...]


class Interpreter:
    """A running interpreter; created by `started`."""

    def __init__(self, entry: SandboxEntry, env: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._entry = entry
        self._name = f"sandbox {entry.sandbox_id}"
        self._env = dict(env)
        self._n_cells = 0
        self._pid = 0
        self._pidfd = -1
        self._closing = contextlib.ExitStack()
        self.output = InterpreterOutput(entry.config.scratch)
        ours, self._theirs = socket.socketpair()
        self._frames = FrameConnection(ours)
        for end in (self.output, self._frames, self._theirs):
            self._closing.callback(end.close)

    @classmethod
    async def started(cls, entry: SandboxEntry, program: Program, env: Mapping[str, str]) -> Interpreter:
        """Start an interpreter and wait until it accepts cells. Raises SandboxError."""
        folder = await asyncio.to_thread(kernel_folder, entry.config.cache)
        kind = _kind(entry.config, program, env, folder)
        reason = ""
        # a zygote may have been killed, and the next one too
        for _ in range(2 if kind else 0):
            assert kind
            interpreter = cls(entry, env)
            try:
                return await interpreter._up(interpreter._fork(kind))
            except PeerGone as gone:
                reason = str(gone)
        if kind:
            _warn(reason)
        interpreter = cls(entry, env)
        return await interpreter._up(interpreter._spawn(program, folder))

    async def _up(self, start: Coroutine[Any, Any, None]) -> Interpreter:
        """Return this interpreter once it is started and ready; close it if that fails."""
        try:
            await start
            await self._wait_until_ready()
            return self
        except BaseException:
            self.close()
            raise

    async def _fork(self, kind: ZygoteKind) -> None:
        """Have a zygote fork it. Raises PeerGone if the zygote does not answer."""
        target = self._entry.target()
        # the zygote runs as the sandbox user, who must not choose a control group
        job = {"target": {**target, "user": None, "cgroup": ""}, "cwd": self._entry.workdir, "env": self._env}
        zygote = await asyncio.to_thread(zygote_pool().get, kind)
        self._closing.enter_context(zygote.in_use())
        try:
            await self._ask(zygote, job)
            descriptors = self._frames.accept_descriptors()
            self._closing.callback(_close_all, descriptors)
            self._let_go()
            self._check(await self._frames.next(START_S))
        except PeerGone as gone:
            raise PeerGone(await asyncio.to_thread(zygote.end)) from gone
        if not descriptors:
            # the kernel limits a user's descriptors in flight, and other processes of this user have reached the limit
            raise PeerGone("too many descriptors of the sandboxes' user are in flight")
        self._hold(descriptors[0])
        if target["cgroup"]:
            _move(self._pid, target["cgroup"])

    async def _ask(self, zygote: Zygote, job: dict[str, Any]) -> None:
        while True:
            try:
                return zygote.fork(job, [self._theirs.fileno(), self.output.write_end])
            except BlockingIOError:
                # many concurrent requests
                await asyncio.sleep(_POLL_S)
            except OSError as error:
                raise PeerGone from error

    async def _spawn(self, program: Program, folder: Path) -> None:
        python = [_PYTHON, "-I", "-S"] if program.on_farm_python else ["python3"]
        argv = [*python, "-c", BOOTSTRAP.format(module=program.module), str(folder)]
        fds = {1: self.output.write_end, 2: self.output.write_end, cell_protocol.CONNECTION: self._theirs.fileno()}
        child = await self._entry.start(argv, env=self._env, fds=fds)
        self._closing.callback(child.close)
        self._let_go()
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(child.pid)
            self._closing.callback(os.close, pidfd)
            self._hold(pidfd)

    def _let_go(self) -> None:
        """Close the interpreter's ends in this process, so that its end is seen as end of file."""
        self._theirs.close()
        self.output.close_write_end()

    def _hold(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._closing.callback(self.kill)
        # its pid on the host
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        self._pid = max(0, next(int(line.split()[1]) for line in lines if line.startswith("Pid:")))

    async def _wait_until_ready(self) -> None:
        try:
            frame = await self._frames.next(START_S)
        except PeerGone:
            lines = self.output.take()[0].strip().splitlines()[-1:]
            frame = {"failed": lines[0] if lines else "it ended at once"}, b""
        self._check(frame)
        # startup output belongs to no cell
        self.output.take()

    def _check(self, frame: Frame | None) -> None:
        if frame is None:
            raise SandboxError(f"{self._name}: no interpreter after {START_S:.0f} s")
        head, _ = frame
        if "gone" in head:
            raise SandboxError(f"{self._name} is gone: its first process has ended")
        if "failed" in head:
            raise SandboxError(f"{self._name}: no interpreter: {str(head['failed'])[:500]}")

    def begin(self, code: str) -> None:
        """Send a cell to run."""
        self._n_cells += 1
        self._frames.send({"cell": self._n_cells}, code.encode("utf-8", "replace"))

    async def ended(self, seconds: float) -> Reply | None:
        """Return the result of the cell; None if it is still running after `seconds`. Raises PeerGone."""
        until = self._loop.time() + seconds
        while frame := await self._frames.next(until - self._loop.time()):
            head, body = frame
            # a cell can find the socket and write anything, e.g. the answer to another cell
            if head.get("cell") == self._n_cells:
                return _reply(head, body)
        return None

    def interrupt(self) -> None:
        """Send SIGINT, like ^C, to the interpreter and its foreground children."""
        if self._pid and not self._ended():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL; its children continue."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Kill it and close its descriptors. Harmless when repeated."""
        self._closing.close()


@cache
def _warn(reason: str) -> None:
    log.warning("Zygote not available; interpreters start slowly, inside their sandboxes: %s", reason)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _move(pid: int, cgroup: str) -> None:
    try:
        Path(cgroup, "cgroup.procs").write_text(str(pid))
    except OSError as error:
        # one of the two has just ended
        raise PeerGone from error


def _reply(head: Mapping[str, Any], body: bytes) -> Reply:
    images, start = [], 0
    try:
        for media_type, n_bytes in head["images"][: cell_protocol.MAX_IMAGES]:
            if media_type not in cell_protocol.MEDIA_TYPES or not 0 < n_bytes <= len(body) - start:
                raise PeerGone
            images.append((media_type, body[start : start + n_bytes]))
            start += n_bytes
        return Reply(str(head["error"])[:_MAX_ERROR], tuple(images))
    except (KeyError, TypeError, ValueError) as error:
        raise PeerGone from error


def _kind(config: SandboxConfig, program: Program, env: Mapping[str, str], kernels: Path) -> ZygoteKind | None:
    """Return the kind of zygote for this program; None if the sandbox does not have the farm's Python.

    Also None if variables are set that only take effect when a Python, or any program, starts.
    """
    python = Path(env["PATH"].partition(":")[0]) / "python3"
    farms_own = python.parent.parent.parent == config.environments_folder
    if not farms_own or any(name.startswith(("PYTHON", "LD_")) for name in env):
        return None
    folders = (str(python.parent.parent), sys.base_prefix, str(kernels))
    if program.on_farm_python:
        return ZygoteKind(_PYTHON, ("-I", "-S"), str(kernels), program.module, folders[1:], config.user)
    return ZygoteKind(str(python), (), str(kernels), program.module, folders, config.user)


class InterpreterOutput(OutputPipe):
    """The output of an interpreter, in bounded memory."""

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch
        self._kept = CommandOutput(scratch)
        self._allowed = _BURST
        self._resume: asyncio.TimerHandle | None = None
        super().__init__()

    def _read(self) -> None:
        try:
            n_read = self._read_chunk(_CHUNK)
        except BlockingIOError:
            # it was taken before this was called
            return
        self._allowed -= n_read
        if not n_read:
            # all write ends are closed
            self._loop.remove_reader(self._read_end)
        elif self._allowed <= 0:
            self._allowed = _PORTION
            self._loop.remove_reader(self._read_end)
            self._resume = self._loop.call_later(_PERIOD_S, self._loop.add_reader, self._read_end, self._read)

    def _read_chunk(self, n_bytes: int) -> int:
        chunk = os.read(self._read_end, n_bytes)
        self._kept.add(chunk)
        return len(chunk)

    def take(self) -> tuple[str, int, bytes | None]:
        """Return the output since the last call, the number of bytes dropped in its middle, and the full output if any.

        A pipe is ordered, so everything written before this call is included.
        """
        # only what has arrived by now, because a background process may write without end
        waiting = array.array("i", [0])
        fcntl.ioctl(self._read_end, termios.FIONREAD, waiting)
        if waiting[0]:
            self._read_chunk(waiting[0])
        kept, self._kept, self._allowed = self._kept, CommandOutput(self._folder), _BURST
        taken = kept.data().decode("utf-8", "replace"), kept.n_dropped, kept.full()
        kept.close()
        return taken

    def close(self) -> None:
        self._kept.close()
        if self._resume is not None:
            self._resume.cancel()
        super().close()

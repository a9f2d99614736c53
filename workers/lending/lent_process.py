"""One process that outlives the call that started it: its pipes or terminal, its output, and its end.

Its output is kept to be watched, by several callers at once. While it is watched, a process that writes too fast waits
for the watchers; otherwise the oldest output is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import time
from base64 import b64decode, b64encode
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from farm.errors import Conflict, InvalidRequest, NotFound, Overloaded, SandboxError
from farm.plugins import follows
from farm.records.lending.sandbox_calls import (
    Done,
    ListProcessesCall,
    OutputPiece,
    ProcessList,
    ProcessOutput,
    ProcessState,
    ResizeProcessCall,
    SignalProcessCall,
    StartProcessCall,
    TerminalSize,
    WatchProcessCall,
    WriteProcessCall,
)
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.optional_protocols import StartsPrograms
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import SandboxProcess

_CHUNK = 1 << 16
_LAST_READS = 16
_WATCHED_S = 10.0
"""Seconds after a watch in which the next one is expected, before output is dropped."""
_DRAIN_S = 0.05
_UNKNOWN_PIDS = 1 << 22
"""Start of the substitute pids of processes that ended before theirs was read: above all pids of Linux."""

MAX_KEPT = 1_000_000
"""Maximum size of one process's output that is kept, in bytes."""
MAX_TAKEN = 500_000
"""Size of a read in bytes, plus the rest of a piece."""

MAX_RUNNING = 64
MAX_ENDED = 16
"""Maximum number of ended processes whose output is kept after it was read to the end."""
MAX_UNREAD = 256
"""Maximum number of ended processes whose output was not read to the end."""


class LentProcess:
    """Used on the event loop. Created by `start`."""

    def __init__(self, process_id: str, call: StartProcessCall, sandbox: StartsPrograms) -> None:
        self.process_id = process_id
        self.call = call
        self.pid = 0
        self.code: int | None = None
        self.timed_out = False
        self.limit = ""
        self.was_read = False
        """True once a caller was told of its end, and so has read all of its output that is kept."""
        self._sandbox = sandbox
        self._mark = new_tag()
        self._notices = sandbox.notices()
        self._log = OutputLog()
        self._readers: dict[int, str] = {}
        self._input = -1
        self._writing = asyncio.Lock()
        self._paused = False
        self._watched_at = time.monotonic()
        self._watched_to = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._child: SandboxProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._limit_timer: asyncio.TimerHandle | None = None
        self._resume_timer: asyncio.TimerHandle | None = None
        self._killing: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, process_id: str, number: int, call: StartProcessCall, sandbox: StartsPrograms) -> LentProcess:
        """Start the program of a call. Raises InvalidRequest for invalid arguments, and SandboxError."""
        process = cls(process_id, call, sandbox)
        theirs: dict[int, int] = {}
        try:
            process._open(theirs)
            env = {**sandbox.environment(call.env), MARK: process._mark}
            process._child = await sandbox.start(
                call.argv, env=env, fds=theirs, terminal=call.terminal is not None, cwd=call.cwd
            )
        except BaseException:
            process.close()
            raise
        finally:
            for descriptor in set(theirs.values()):
                os.close(descriptor)
        child = process._child
        process.pid = _number_inside(child.pid) or _UNKNOWN_PIDS + number
        child.ended.add_done_callback(lambda ended: process._note_end())
        if call.limit_s is not None:
            process._limit_timer = process._loop.call_later(call.limit_s, process._note_time)
        return process

    def _open(self, theirs: dict[int, int]) -> None:
        if self.call.terminal is not None:
            ours, theirs[0] = os.openpty()
            theirs[1] = theirs[2] = theirs[0]
            termios.tcsetwinsize(ours, (self.call.terminal.rows, self.call.terminal.columns))
            self._input = ours
            self._read_from(ours, "terminal")
            return
        if self.call.stdin:
            theirs[0], self._input = os.pipe()
            os.set_blocking(self._input, False)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            ours, theirs[number] = os.pipe()
            self._read_from(ours, stream)

    def _read_from(self, descriptor: int, stream: str) -> None:
        os.set_blocking(descriptor, False)
        self._readers[descriptor] = stream
        self._loop.add_reader(descriptor, self._read, descriptor)

    @property
    def running(self) -> bool:
        return not self._ended

    @property
    def state(self) -> ProcessState:
        call = self.call
        return ProcessState(
            self.process_id, self.pid, call.label, tuple(call.argv), dict(call.env or {}), call.cwd or ""
        )

    async def watch(self, after: int | None, wait_s: float) -> ProcessOutput:
        """Return the output from an offset on, once there is some or it has ended; empty after `wait_s`."""
        offset = self._log.end if after is None else min(after, self._log.end)
        deadline = self._loop.time() + wait_s
        while True:
            self._note_watch(offset)
            self._changed.clear()
            if self._log.end > offset or self._ended or (left_s := deadline - self._loop.time()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _WATCHED_S / 2)):
                    await self._changed.wait()
        pieces, end = self._log.taken(offset)
        ended = self._ended and end == self._log.end
        self.was_read = self.was_read or ended
        return ProcessOutput(
            process_id=self.process_id,
            pid=self.pid,
            pieces=tuple(OutputPiece(piece.stream, b64encode(piece.data).decode()) for piece in pieces),
            next=end,
            n_dropped=max(0, self._log.first - offset),
            ended=ended,
            code=self.code if ended else None,
            timed_out=ended and self.timed_out,
            limit=self.limit if ended else "",
        )

    def _note_watch(self, offset: int) -> None:
        self._watched_at = time.monotonic()
        self._watched_to = max(self._watched_to, offset)
        if self._paused:
            self._resume()

    def _read(self, descriptor: int) -> bool:
        """Read once. Returns whether there may be more now."""
        n_bytes, unwatched_s = _CHUNK, time.monotonic() - self._watched_at
        if not self._ended and unwatched_s < _WATCHED_S:
            # otherwise the log would drop bytes that were not taken from it yet
            n_bytes = min(_CHUNK, MAX_KEPT - (self._log.end - self._watched_to))
            if n_bytes <= 0:
                self._pause(_WATCHED_S - unwatched_s)
                return False
        try:
            data = os.read(descriptor, n_bytes)
        except BlockingIOError:
            return False
        except OSError:
            # the end of a terminal that no program has open any more
            data = b""
        if not data:
            self._stop_reading(descriptor)
            return False
        if self._ended:
            # processes that it left may write for ever, to nobody: do not wait long for them or use much CPU time
            self._pause(_DRAIN_S)
            return False
        self._log.add(self._readers[descriptor], data)
        self._changed.set()
        return True

    def _pause(self, seconds: float) -> None:
        """Let the program wait until there is room, or for as long as a watcher may still come."""
        self._paused = True
        for descriptor in self._readers:
            self._loop.remove_reader(descriptor)
        self._resume_timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        if self._paused:
            self._paused = False
            for descriptor in self._readers:
                self._loop.add_reader(descriptor, self._read, descriptor)

    def _stop_reading(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        del self._readers[descriptor]
        if descriptor == self._input:
            self._input = -1
        os.close(descriptor)

    def _note_end(self) -> None:
        """Read the output from before its end, without waiting for processes that continue to write."""
        assert self._child is not None
        self._watched_to = self._log.end + MAX_KEPT
        for descriptor in list(self._readers):
            # at most the size of a pipe, because processes that it left may write without end
            for _ in range(_LAST_READS):
                if not self._read(descriptor):
                    break
        self.code = self._child.ended.result()
        self.limit = self._notices.take(self.code)
        self._ended = True
        self._child.close()
        self._resume()
        self._close_input()
        self._changed.set()

    def _note_time(self) -> None:
        if not self._ended:
            self.timed_out = True
            task = self._loop.create_task(self.kill())
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)

    async def write(self, data: bytes, close: bool, wait_s: float) -> None:
        """Write to its input as it reads. Raises Conflict if it does not take all of it within `wait_s`."""
        if self.call.terminal is None and not self.call.stdin:
            raise InvalidRequest("was started without an input: start it with `stdin`", field="process")
        if close and self.call.terminal is not None:
            raise InvalidRequest(
                "is not possible with a terminal: write b'\\x04', which ends most programs", field="close"
            )
        async with self._writing:
            n_written = 0
            deadline = self._loop.time() + wait_s
            while n_written < len(data):
                if self._input < 0:
                    closed = f"process {self.pid} took {n_written} of {len(data)} bytes"
                    raise Conflict(f"{closed}: its input is closed")
                try:
                    n_written += os.write(self._input, data[n_written : n_written + _CHUNK])
                except BlockingIOError:
                    if not await self._writable(deadline):
                        slow = f"process {self.pid} took {n_written} of {len(data)} bytes within {wait_s:g} s"
                        raise Conflict(f"{slow}: it does not read its input") from None
                except OSError:
                    self._close_input()
            if close:
                self._close_input()

    async def _writable(self, deadline: float) -> bool:
        """Wait until its input takes more, or is closed. Returns False after the deadline."""
        descriptor, ready = self._input, asyncio.Event()
        self._loop.add_writer(descriptor, ready.set)
        try:
            # its end does not make the input writable
            while self._input == descriptor and not self._ended:
                left_s = deadline - self._loop.time()
                if left_s <= 0:
                    return False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, 0.5)):
                        await ready.wait()
                        return True
            return True
        finally:
            if self._input == descriptor:
                self._loop.remove_writer(descriptor)

    def _close_input(self) -> None:
        if self._input >= 0 and self._input not in self._readers:
            self._loop.remove_writer(self._input)
            os.close(self._input)
        self._input = -1

    def resize(self, size: TerminalSize) -> None:
        """Set the size of its terminal. Raises InvalidRequest if it has none."""
        if self.call.terminal is None:
            raise InvalidRequest("has no terminal", field="process")
        if self._input >= 0:
            termios.tcsetwinsize(self._input, (size.rows, size.columns))

    async def signal(self, name: str) -> None:
        """Send it a signal; KILL goes to all of its descendants."""
        if name == "KILL":
            await self.kill()
        elif self._child is not None and not self._ended:
            self._child.signal(signal.Signals[f"SIG{name}"])

    async def kill(self) -> None:
        """Kill it and its descendants, which may outlive it. Raises SandboxError."""
        if self._child is not None and not self._ended:
            self._child.kill()
        await asyncio.to_thread(kill_tagged, self._mark)
        if self._child is not None and not self._ended:
            with contextlib.suppress(SandboxError):
                await self._child.wait()

    def close(self) -> None:
        """Kill it if it runs, and close its pipes. Harmless when repeated."""
        for timer in (self._limit_timer, self._resume_timer):
            if timer is not None:
                timer.cancel()
        self._close_input()
        for descriptor in list(self._readers):
            self._stop_reading(descriptor)
        if self._child is not None:
            self._child.close()


def _number_inside(pid: int) -> int:
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), 0)


@dataclass(frozen=True, slots=True)
class LoggedPiece:
    """Bytes of one stream; `start` is the offset of the first byte."""

    start: int
    stream: str
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class OutputLog:
    """All streams of a process in one sequence of bytes; `first` is the oldest kept offset, `end` the next new one."""

    def __init__(self) -> None:
        self.first = self.end = 0
        self._pieces: deque[LoggedPiece] = deque()

    def add(self, stream: str, data: bytes) -> None:
        """Add bytes; the oldest are dropped."""
        self._pieces.append(LoggedPiece(self.end, stream, data))
        self.end += len(data)
        while self.end - self._pieces[0].end >= MAX_KEPT:
            self._pieces.popleft()
        self.first = self._pieces[0].start

    def taken(self, after: int) -> tuple[list[LoggedPiece], int]:
        """Return the pieces from an offset on, up to the size of a read, and the offset of the next byte."""
        pieces: list[LoggedPiece] = []
        offset = max(after, self.first)
        for piece in self._pieces:
            if piece.end <= offset:
                continue
            if offset - max(after, self.first) >= MAX_TAKEN:
                break
            pieces.append(LoggedPiece(offset, piece.stream, piece.data[offset - piece.start :]))
            offset = piece.end
        return pieces, max(offset, after)


class ProcessTable:
    """Answers the calls about processes, on the event loop."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._n_started = 0
        self._n_starting = 0
        self._by_id: dict[str, LentProcess] = {}

    async def start(self, call: StartProcessCall) -> ProcessState:
        """Start a process. Raises Overloaded if too many run, InvalidRequest if this kind of sandbox has none."""
        sandbox = self._sandbox
        if not follows(sandbox, StartsPrograms):
            raise InvalidRequest("is not for this kind of sandbox: use exec or shell", field="argv")
        if len(self._running()) + self._n_starting >= MAX_RUNNING:
            raise Overloaded(f"sandbox {self._sandbox.sandbox_id} runs {MAX_RUNNING} processes: end one first")
        self._n_starting += 1
        self._n_started += 1
        number = self._n_started
        try:
            process = await LentProcess.start(f"process-{number}", number, call, sandbox)
        finally:
            self._n_starting -= 1
        self._by_id[process.process_id] = process
        self._forget_old()
        return process.state

    def _running(self) -> list[LentProcess]:
        return [process for process in self._by_id.values() if process.running]

    def _forget_old(self) -> None:
        ended = [process for process in self._by_id.values() if not process.running]
        read = [process for process in ended if process.was_read]
        unread = [process for process in ended if not process.was_read]
        for process in (*read[:-MAX_ENDED], *unread[:-MAX_UNREAD]):
            process.close()
            del self._by_id[process.process_id]

    def _process(self, name: str) -> LentProcess:
        if (process := self._by_id.get(name)) is not None:
            return process
        running = self._running()
        for process in running:
            if name == str(process.pid):
                return process
        for process in running:
            if name == process.call.label:
                return process
        raise NotFound(f"sandbox {self._sandbox.sandbox_id} has no process {name!r:.200}")

    async def watch(self, call: WatchProcessCall) -> ProcessOutput:
        return await self._process(call.process).watch(call.after, call.timeout_s)

    async def write(self, call: WriteProcessCall) -> Done:
        await self._process(call.process).write(b64decode(call.data), call.close, call.timeout_s)
        return Done()

    async def signal(self, call: SignalProcessCall) -> Done:
        await self._process(call.process).signal(call.signal)
        return Done()

    async def resize(self, call: ResizeProcessCall) -> Done:
        self._process(call.process).resize(call.terminal)
        return Done()

    async def list(self, call: ListProcessesCall) -> ProcessList:
        return ProcessList(tuple(process.state for process in self._running()))

    def close(self) -> None:
        """Kill all running processes, and forget them."""
        for process in self._by_id.values():
            process.close()
        self._by_id.clear()

"""One bash process, controlled out of band: programs in it cannot see, consume or forge the protocol.

Commands, exit codes and directories use a socket; output has a pipe. The line typed on the terminal is constant and
evaluates the next command (`shell_protocol.py`). So there is no quoting, no echo, no prompt and no marker in the
output, and neither an open quote nor a program that reads its input can swallow anything.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import resource
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from farm.errors import SandboxError
from workers.sandboxes.processes.command_output import CommandOutput, HeadTail
from workers.sandboxes.processes.process_tree import MARK
from workers.sandboxes.processes.sandbox_process import SandboxEntry, SandboxProcess
from workers.sandboxes.shell.shell_protocol import CommandEnd, death, end, may_redirect, protocol, ready
from workers.sandboxes.shell.terminal import Terminal, reads_its_input

_BIG_COMMAND = 2048
_RECORD, _RECORDS = 4096, 4_000_000
_CHUNK = 65536
_ANCILLARY = socket.CMSG_SPACE(struct.calcsize("iII"))
_UNWATCHED_S = 0.002
"""Time within which a command that finishes costs only one turn of the event loop: its output is read at its end."""
_FAST = 16_000_000
_PERIOD_S = 0.001
"""Bytes of a command's output read at full speed, and seconds between chunks of the rest."""
_READS = 64
"""Maximum number of chunks read after a command's end, because a background job may continue to write."""


class OutputChunk(NamedTuple):
    """Output that has arrived and was not returned before."""

    text: str
    n_dropped: int
    full: bytes | None


def _n_files(entry: SandboxEntry) -> int:
    try:
        return entry.target()["limits"]["RLIMIT_NOFILE"]
    except SandboxError:
        # a sandbox that is not joined: this process's own limit applies
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class ShellSession:
    """One bash and its descriptors; runs one command at a time. All methods run on the event loop."""

    def __init__(self, entry: SandboxEntry) -> None:
        self.terminal = Terminal()
        self.ended: CommandEnd | None = None
        self.received_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._protocol = numbers = protocol(_n_files(entry))
        self._socket, their_socket = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._output_out, output_in = os.pipe()
        os.set_blocking(self._output_out, False)
        self._memory = os.memfd_create("command")
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._theirs = {numbers.socket: their_socket.detach(), numbers.output: output_in, numbers.nothing: nothing}
        self._child: SandboxProcess | None = None
        self._writer = b""
        self._records = bytearray()
        self._number = 1
        self._code = 0
        self._interrupted = False
        self._kept = False
        self.has_terminal = False
        self._wants_terminal = False
        self._stored = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle
        self._watch: asyncio.TimerHandle | None = None
        self._watching = False
        self._watches_later = False
        self._chatter = HeadTail(2000)
        self._folder = entry.config.scratch
        self._output = CommandOutput(self._folder)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    async def start(cls, entry: SandboxEntry, mark: str) -> ShellSession:
        """Start a bash, which is ready when command 1 has ended. Raises SandboxError if the sandbox is gone."""
        session = cls(entry)
        try:
            await session._enter(entry, mark)
        except BaseException:
            session.close()
            raise
        return session

    async def _enter(self, entry: SandboxEntry, mark: str) -> None:
        fds = dict.fromkeys((0, 1, 2), self.terminal.slave) | self._theirs | {self._protocol.memory: self._memory}
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._child = await entry.start(argv, env=entry.environment({MARK: mark}), fds=fds, terminal=True)
        self._close_theirs()
        self.terminal.hand_over(self._child.pid)
        self._writer = struct.pack("i", self._child.pid)
        self._child.ended.add_done_callback(self._note_death)
        self._loop.add_reader(self._socket.fileno(), self._read_records)
        self._loop.add_reader(self.terminal.fd, self._read_terminal)
        self._watch_output()
        self.terminal.type(self._protocol.boot)

    @property
    def pid(self) -> int:
        """The pid of bash on the host."""
        assert self._child
        return self._child.pid

    @property
    def chatter(self) -> str:
        """The shell's own output on its terminal."""
        return self._chatter.text()

    def send(self, command: bytes, *, typed: bool = False) -> None:
        """Start a command; `typed` gives it the terminal."""
        if not self.alive:
            return
        self._unwatch_output()
        self.ended = None
        self._number += 1
        self._wants_terminal = typed
        self._stored = typed or len(command) > _BIG_COMMAND
        skip, self._interrupted = self._interrupted, False
        if skip:
            self._put(b"%d\0" % self._number)
        if self._stored:
            os.pwrite(self._memory, command + b"\0", 0)
            os.lseek(self._memory, 0, os.SEEK_SET)
        else:
            self._put(command + b"\0")
        how = {"stored": self._stored, "typed": typed, "skip": skip}
        line = self._protocol.line(self._number, self._code, keeps=may_redirect(command), kept=self._kept, **how)
        self.terminal.type(line)
        self._watches_later = True

    def _put(self, data: bytes) -> None:
        # bash may have died, which its end will report
        with contextlib.suppress(OSError):
            self._socket.sendall(data)

    async def settled(self, seconds: float) -> CommandEnd | None:
        """Return the command's end, or None if it is still running after `seconds`."""
        if self.ended is None:
            self._waiter = waiter = self._loop.create_future()
            deadline = self._loop.time() + seconds
            if self._watches_later and seconds > _UNWATCHED_S:
                # one timer for both steps, because most commands end before either
                self._timer = self._loop.call_later(_UNWATCHED_S, self._watch_until, deadline)
            else:
                self._watch_until(deadline)
            try:
                await waiter
            finally:
                self._timer.cancel()
                self._waiter = None
        return self.ended

    def _watch_until(self, deadline: float) -> None:
        if self._watches_later:
            self._watches_later = False
            self._watch_output()
        self._timer = self._loop.call_at(deadline, self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def n_waiting(self) -> int:
        """The number of bytes that `take` would return."""
        return self._output.n_bytes

    @property
    def alive(self) -> bool:
        """True if bash is not known to have ended."""
        return self.ended is None or self.ended.alive

    def type(self, keys: bytes) -> int:
        """Type as many keys for the foreground program as the terminal accepts now; return their number."""
        self.received_at = self._loop.time()
        if self.terminal.is_signal(keys):
            # else the key would wait behind unread input
            self.terminal.forget()
        return self.terminal.type(keys)

    def catch_up(self) -> bool:
        """Read records and output that have arrived; return whether there was output.

        If the shell itself reads the terminal, it has just sent the command's end.
        """
        n_before = self._output.n_bytes
        self._read_records()
        self._read_terminal()
        return self._output.n_bytes > n_before

    def interrupt(self, keys: bytes) -> None:
        """Type keys that should end the command."""
        self._interrupted = True
        if self.has_terminal:
            self.terminal.hide()
            self.terminal.forget()
        self.terminal.type(keys)

    def take(self) -> OutputChunk:
        """Return the output since the last call."""
        output = self._output
        if not output.n_bytes:
            return OutputChunk("", 0, None)
        self._output = CommandOutput(self._folder)
        text = self._decoder.decode(output.data(), final=self.ended is not None)
        taken = OutputChunk(text, output.n_dropped, output.full())
        output.close()
        return taken

    def _read_records(self) -> None:
        self._receive()
        self._parse()

    def _receive(self) -> bool:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_RECORD, _ANCILLARY)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            return False
        # the kernel identifies the writer
        if ancillary and ancillary[0][2].startswith(self._writer):
            self._records += data
        return True

    def _parse(self) -> None:
        while b"\0" in self._records and not self._records.startswith(b"X"):
            record, _, self._records = self._records.partition(b"\0")
            if self._wants_terminal and ready(record, self._number):
                self._give_terminal()
            elif self.ended is None and (ended := end(record, self._number)) is not None:
                self._finish(ended)
        if len(self._records) > _RECORDS:
            self._records.clear()

    def _give_terminal(self) -> None:
        """Give the terminal to the command. Echo is enabled only now, because bash has read its own line."""
        self._decoder.reset()
        self._wants_terminal = False
        self.has_terminal = True
        self.received_at = self._loop.time()
        self.terminal.show()
        self._put(b"\0")

    def _take_terminal(self) -> None:
        for _ in range(_READS):
            data = self.terminal.read()
            if not data:
                break
            self._output.add(data)
        self.has_terminal = False
        # unread input must not become a shell command; the shell waits until it is dropped
        self.terminal.hide()
        self.terminal.forget()
        self._put(b"\0")
        self._interrupted = True

    def _finish(self, ended: CommandEnd) -> None:
        # a pipe is ordered: output written before the record can be read now
        for _ in range(_READS):
            if self._read_output() < _CHUNK:
                break
        if self.has_terminal:
            self._take_terminal()
        if self._stored:
            os.ftruncate(self._memory, 0)
        self.ended = ended
        self._code = ended.code or 0
        self._kept = self._kept or ended.kept
        self._wake()

    def lost(self) -> bool:
        """Return whether bash waits for its next line without having sent a record: its protocol is then broken."""
        self._read_records()
        return self.ended is None and not self.has_terminal and reads_its_input(self.pid, self.terminal.name)

    @property
    def redirected(self) -> bool:
        """True if the output of commands goes elsewhere, after `exec >file`."""
        try:
            kept = Path(f"/proc/{self.pid}/fd/{self._protocol.stdout}").readlink()
        except OSError:
            return False
        return kept != Path(f"/proc/self/fd/{self._output_out}").readlink()

    def _note_death(self, code: asyncio.Future[int | None]) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        while self._receive():
            self._parse()
        self._finish(death(bytes(self._records), code.result()))

    def _read_terminal(self) -> None:
        data = self.terminal.read()
        if data is None:
            self._loop.remove_reader(self.terminal.fd)
        elif self.has_terminal:
            self.received_at = self._loop.time()
            self._output.add(data)
            if self._output.n_bytes > _FAST:
                self._loop.remove_reader(self.terminal.fd)
                self._loop.call_later(_PERIOD_S, self._watch_terminal)
        else:
            self._chatter.add(data)

    def _read_output(self) -> int:
        try:
            chunk = os.read(self._output_out, _CHUNK)
        except BlockingIOError:
            return 0
        self._output.add(chunk)
        if not chunk:
            self._unwatch_output()
        elif self._output.n_bytes > _FAST and self._watching:
            self._unwatch_output()
            self._watch = self._loop.call_later(_PERIOD_S, self._watch_output)
        return len(chunk)

    def _watch_output(self) -> None:
        self._watching = True
        self._loop.add_reader(self._output_out, self._read_output)

    def _unwatch_output(self) -> None:
        self._watches_later = False
        if self._watch is not None:
            self._watch.cancel()
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._output_out)

    def _watch_terminal(self) -> None:
        if self.terminal.fd >= 0:
            self._loop.add_reader(self.terminal.fd, self._read_terminal)

    def close(self) -> None:
        """Kill bash and close the descriptors. Harmless when repeated."""
        if self._child is not None:
            self._child.close()
        if self._socket.fileno() < 0:
            return
        self._unwatch_output()
        for number in (self._socket.fileno(), self.terminal.fd):
            self._loop.remove_reader(number)
        self._close_theirs()
        self.terminal.close()
        self._socket.close()
        os.close(self._output_out)
        os.close(self._memory)
        self._output.close()

    def _close_theirs(self) -> None:
        for descriptor in self._theirs.values():
            os.close(descriptor)
        self._theirs.clear()

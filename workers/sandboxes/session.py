"""One bash process, driven out of band: nothing of the protocol can be seen, eaten or forged by accident by a command.

Commands go in, and exit code and directory come back, on descriptors of their own; output has a third. What is typed on
the terminal is one constant line that reads the next command and evals it. So there is no quoting, no echo, no prompt,
no marker in the output, and an open quote or a program that reads its input cannot swallow anything.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import termios
from typing import NamedTuple

from ptyprocess import PtyProcess

from workers.sandboxes.entry import Entry
from workers.sandboxes.headtail import HeadTail
from workers.sandboxes.marked import MARK, kill_joined
from workers.sandboxes.terminal import spawn

OUTPUT_LIMIT = 200_000
"""Bytes of a command's output that are kept."""

_FIRST_DESCRIPTOR = 200
_BIG_COMMAND = 2048
_PIPE_BYTES = 8192
_STATUS_BYTES = 4_000_000

# C: commands in, S: status out, O: output, M: a memory file for commands too long for C
_BOOT = r"""
unset HISTFILE; set +o history; history -c; PS0= PS1= PS2= PS4='+ ';
__sandbox_done() { local r=$?; if [[ -n ${__sandbox_busy-} ]]; then __sandbox_busy=;
builtin printf '%d %s\0' "$r" "$PWD" >&@S; fi; return $r; };
__sandbox_code() { return "${__sandbox_last:-0}"; };
PROMPT_COMMAND='__sandbox_last=$?; PS0= PS1= PS2=; __sandbox_code; __sandbox_done';
trap 'builtin printf "X%d %s\0" "$?" "$PWD" >&@S; declare -px >&@S; builtin printf "\0" >&@S' EXIT;
__sandbox_busy=1; __sandbox_done
"""
_RUN = r' __sandbox_busy=1; __sandbox_code; eval "$__sandbox_command" >&@O 2>&1 </dev/null; __sandbox_done' + "\n"
_READ = " IFS= read -r -d '' -u @C __sandbox_command;" + _RUN
# bash reads a pipe one byte at a time, a file in blocks
_READ_BIG = " IFS= read -r -d '' __sandbox_command </proc/self/fd/@M;" + _RUN


class Ended(NamedTuple):
    """What is known of a command's end; `alive` is False if the shell ended with it."""

    code: int | None
    cwd: str
    alive: bool = True
    exported: str = ""


class Session:
    """One bash process and its descriptors, for as long as it lives. All is done on the event loop."""

    def __init__(self, entry: Entry, mark: str) -> None:
        self.output = HeadTail(OUTPUT_LIMIT)
        self.chatter = HeadTail(2000)
        self._loop = asyncio.get_running_loop()
        self._status = bytearray()
        self.current: asyncio.Future[Ended] = self._loop.create_future()
        self._death: Ended | None = None
        command_out, self._command_in = _pipe(_PIPE_BYTES)
        self._status_out, status_in = _pipe(_PIPE_BYTES)
        self._output_out, output_in = _pipe()
        os.set_blocking(self._output_out, False)
        self._memory = os.memfd_create("command")
        self._open = [self._command_in, self._status_out, self._output_out, self._memory]
        # numbers that a user's own `exec 3>file` does not meet
        given = (command_out, status_in, output_in, self._memory)
        theirs = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR) for number in given]
        try:
            argv = entry.enter(["bash", "--norc", "--noprofile", "--noediting", "-i"])
            self.terminal: PtyProcess = spawn(argv, entry.environment({MARK: mark}), theirs)
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for number in (*theirs, command_out, status_in, output_in):
                os.close(number)
        self._names = dict(zip(("@C", "@S", "@O", "@M"), map(str, theirs), strict=True))
        self._pidfd = os.pidfd_open(self.terminal.pid)
        self._open.append(self._pidfd)
        for number, callback in (
            (self._pidfd, self._note_death),
            (self._status_out, self._read_status),
            (self._output_out, self._read_output),
            (self.terminal.fd, self._read_terminal),
        ):
            self._loop.add_reader(number, callback)

    def _filled(self, text: str) -> bytes:
        for name, number in self._names.items():
            text = text.replace(name, number)
        return text.encode()

    def boot(self) -> asyncio.Future[Ended]:
        self.terminal.write(self._filled(" " + _BOOT.strip().replace("\n", " ") + "\n"))
        return self.current

    def send(self, command: bytes) -> asyncio.Future[Ended]:
        """Start a command; what comes of it is the future's result."""
        self.current = self._loop.create_future()
        if self._death is not None:
            self.current.set_result(self._death)
            return self.current
        # it may die meanwhile, which its pidfd will tell
        with contextlib.suppress(OSError):
            self._write(command)
        return self.current

    def _write(self, command: bytes) -> None:
        big = len(command) > _BIG_COMMAND
        if big:
            os.ftruncate(self._memory, 0)
            os.pwrite(self._memory, command + b"\0", 0)
        else:
            os.write(self._command_in, command + b"\0")
        self.terminal.write(self._filled(_READ_BIG if big else _READ))

    def _read_terminal(self) -> None:
        """The shell's own chatter, such as notices of jobs."""
        try:
            self.chatter.add(os.read(self.terminal.fd, 65536))
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_reader(self.terminal.fd)

    def _read_output(self) -> None:
        # no more than is there now: a job in the background may write without end
        waiting = array.array("i", [0])
        fcntl.ioctl(self._output_out, termios.FIONREAD, waiting)
        try:
            chunk = os.read(self._output_out, max(1, waiting[0]))
        except BlockingIOError:
            return
        self.output.add(chunk)
        if not chunk:
            self._loop.remove_reader(self._output_out)

    def _read_status(self) -> None:
        chunk = os.read(self._status_out, 65536)
        if not chunk:
            self._loop.remove_reader(self._status_out)
        self._status += chunk
        record, separator, rest = self._status.partition(b"\0")
        if separator and not record.startswith(b"X"):
            self._status = rest
            code, _, cwd = record.decode("utf-8", "surrogateescape").partition(" ")
            # anything else was written by a command, which can find the descriptor if it looks for it
            if code.isdecimal():
                self._finish(Ended(int(code), cwd))
        elif len(self._status) > _STATUS_BYTES:
            self._status.clear()

    def _note_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.set_blocking(self._status_out, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._status_out, 65536):
                self._status += chunk
        self.terminal.wait()
        last, _, exported = self._status.decode("utf-8", "surrogateescape").partition("\0")
        code, _, cwd = last.removeprefix("X").partition(" ")
        if last.startswith("X") and code.isdecimal():
            self._finish(Ended(int(code), cwd, alive=False, exported=exported.rstrip("\0")))
        else:
            signal_number = self.terminal.signalstatus
            code_seen = 128 + signal_number if signal_number else self.terminal.exitstatus
            self._finish(Ended(code_seen, "", alive=False))

    def _finish(self, ended: Ended) -> None:
        # a pipe is exact: what was written before the status is readable now
        self._read_output()
        self._death = None if ended.alive else ended
        if not self.current.done():
            self.current.set_result(ended)

    def close(self) -> None:
        """Kill the bash, wait for it, give up the descriptors."""
        kill_joined(self.terminal.pid)
        for number in (self._pidfd, self._status_out, self._output_out, self.terminal.fd):
            self._loop.remove_reader(number)
        if self.terminal.isalive():
            self.terminal.wait()
        self.terminal.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for number in self._open:
            os.close(number)
        self._open.clear()


def _pipe(n_bytes: int = 0) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    if n_bytes:
        # the kernel bounds the sum of all of a user's pipes, and those of a shell's protocol never carry much
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, n_bytes)
    return read_end, write_end

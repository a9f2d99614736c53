"""A shell's terminal, from the side of its user: typing, echo, and the programs in its foreground.

A program that waits for input is detected by the system call that blocks it, so a driver need not guess from silence
whether it computes or waits. If the kernel does not show the call (other machine type, hardened kernel), silence is the
only sign.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import struct
import termios
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from ptyprocess import PtyProcess

from workers.sandboxes.processes.process_tree import children

_ROWS, _COLUMNS = 50, 200
_INPUT_FLAGS, _OUTPUT_FLAGS, _LOCAL_FLAGS = 0, 1, 3
# TIOCGPTPEER, since Linux 4.13
_OPEN_SLAVE = 0x5441
_SIGNALS = (b"\x03", b"\x1c", b"\x1a")
MAX_LINE = 4095
"""Maximum length of a line on a terminal in bytes, unless the program reads key by key."""

_MOST = 64
# read, readv; then poll, select, pselect6, ppoll, epoll_wait, epoll_pwait, epoll_pwait2
_READS = {"x86_64": {0, 19}, "aarch64": {63, 65}}.get(platform.machine(), set())
_POLLS = {"x86_64": {7, 23, 270, 271, 232, 281, 441}, "aarch64": {72, 73, 22, 441}}.get(platform.machine(), set())
_OWN_TERMINAL = "/tty"


class Terminal:
    """Both ends of a new terminal. `slave` is for the program; `hand_over` closes it here."""

    def __init__(self) -> None:
        self.fd, self.slave = os.openpty()
        os.set_blocking(self.fd, False)
        self.name = str(Path(f"/proc/self/fd/{self.slave}").readlink())
        self._process: PtyProcess | None = None
        attributes = termios.tcgetattr(self.slave)
        # output without carriage returns, and ^S does not stop it
        attributes[_OUTPUT_FLAGS] &= ~termios.ONLCR
        attributes[_INPUT_FLAGS] &= ~termios.IXON
        # otherwise ^C discards output that was not read yet
        attributes[_LOCAL_FLAGS] |= termios.NOFLSH
        self._seen = attributes
        self._unseen = [*attributes]
        self._unseen[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHONL)
        self.hide()

    def hand_over(self, pid: int) -> None:
        """Close `slave` after the program has received it, and set the window size."""
        os.close(self.slave)
        self.slave = -1
        self._process = PtyProcess(pid, self.fd)
        self._process.setwinsize(_ROWS, _COLUMNS)

    def show(self) -> None:
        """Echo typed keys."""
        self._set(self._seen)

    def hide(self) -> None:
        """Do not echo typed keys, and let them send signals even if a program had disabled that."""
        self._set(self._unseen)

    def forget(self) -> None:
        """Discard unread input: first the bytes on their way to the program, then those that have arrived."""
        # not by TCSAFLUSH, which waits in the kernel, possibly for ever, for a program that is writing
        with contextlib.suppress(OSError, termios.error):
            termios.tcflush(self.fd, termios.TCOFLUSH)
            with self._program_end() as slave:
                termios.tcflush(slave, termios.TCIFLUSH)

    def has_unread(self) -> bool:
        """Return whether typed input (a whole line in line mode) has not been read by a program yet."""
        try:
            with self._program_end() as slave:
                return fcntl.ioctl(slave, termios.FIONREAD, b"\0" * 4) != b"\0" * 4
        except OSError:
            return False

    @contextlib.contextmanager
    def _program_end(self) -> Iterator[int]:
        slave = fcntl.ioctl(self.fd, _OPEN_SLAVE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            yield slave
        finally:
            os.close(slave)

    def _set(self, attributes: list[int | list[bytes | int]]) -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self.fd, termios.TCSANOW, attributes)

    def takes_lines(self) -> bool:
        """Return whether the terminal is in line mode, in which programs get whole lines instead of keys."""
        return self._has(termios.ICANON)

    def is_signal(self, keys: bytes) -> bool:
        """Return whether the first key is ^C, ^backslash or ^Z and sends its signal."""
        return keys[:1] in _SIGNALS and self._has(termios.ISIG)

    def _has(self, flag: int) -> bool:
        try:
            return bool(termios.tcgetattr(self.fd)[_LOCAL_FLAGS] & flag)
        except termios.error:
            return False

    def type(self, keys: bytes) -> int:
        """Type as many of the keys as the terminal accepts now; return their number."""
        try:
            return os.write(self.fd, keys)
        except OSError:
            return 0

    def read(self) -> bytes | None:
        """Read some output of the terminal; empty if there is none now, None if no more can come."""
        try:
            return os.read(self.fd, 65536) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def foreground_group(self) -> int:
        """Return the foreground process group on the host, which ^C signals; 0 if there is none."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCGPGRP, b"\0" * 4))[0])
        except OSError:
            return 0

    def close(self) -> None:
        """Close both ends. Harmless when repeated."""
        if self.fd < 0:
            return
        if self._process is None:
            os.close(self.slave)
            os.close(self.fd)
        else:
            # close() of the object would wait for a child process, but the program is not one
            self._process.fileobj.close()
            self._process.closed = True
        self.fd = self.slave = -1


class ProgramActivity(IntEnum):
    """The activity of a program. The activity of a group is the highest of its programs."""

    UNKNOWN = 0
    BUSY = 1
    WAITING = 2
    """Waiting for an event, which may be a key."""
    READING = 3
    """Reading the terminal, i.e. waiting for the user."""


def doing(shell: int, group: int, terminal: str) -> ProgramActivity:
    """Return the activity of a group among a shell and its descendants; `terminal` is its name on the host."""
    return max((_of_process(pid, terminal) for pid in members(shell, group)), default=ProgramActivity.BUSY)


def reads_its_input(pid: int, terminal: str) -> bool:
    """Return whether a process is blocked reading this terminal as its standard input; False if unknown."""
    try:
        number, descriptor, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
        is_input = number.isdecimal() and int(number) in _READS and int(descriptor, 16) == 0
        return is_input and str(Path(f"/proc/{pid}/fd/0").readlink()) == terminal
    except (OSError, ValueError):
        return False


def members(shell: int, group: int) -> list[int]:
    """Return the processes of a group among a shell and its descendants."""
    return [pid for pid in _family(shell) if _group_of(pid) == group]


def _family(pid: int) -> Iterator[int]:
    pids = [pid]
    for each in pids:
        yield each
        pids += children(each)[: _MOST - len(pids)]


def _group_of(pid: int) -> int:
    try:
        # `stat` has it, too, but can block on a process in an uninterruptible sleep
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("NSpgid:")).split()[1])
    except (OSError, StopIteration):
        return 0


def _of_process(pid: int, terminal: str) -> ProgramActivity:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())[:_MOST]
    except OSError:
        return ProgramActivity.BUSY
    return max((_of_task(task, terminal) for task in tasks), default=ProgramActivity.BUSY)


def _of_task(task: Path, terminal: str) -> ProgramActivity:
    try:
        # the call's number and arguments, or `running`
        number, *arguments = (task / "syscall").read_text().split()
    except PermissionError:
        return ProgramActivity.UNKNOWN if _has_memory(task) else ProgramActivity.BUSY
    except (OSError, ValueError):
        # the process is ending
        return ProgramActivity.BUSY
    if not _READS:
        return ProgramActivity.UNKNOWN
    if not number.isdecimal():
        return ProgramActivity.BUSY
    if int(number) in _READS and _is_terminal(task / "fd" / str(int(arguments[0], 16)), terminal):
        return ProgramActivity.READING
    return ProgramActivity.WAITING if int(number) in _POLLS else ProgramActivity.BUSY


def _has_memory(task: Path) -> bool:
    """Return whether a process has memory. One that is exiting has none, and newer kernels hide its call from users."""
    try:
        return "\nVmSize:" in (task / "status").read_text(errors="replace")
    except OSError:
        return False


def _is_terminal(descriptor: Path, terminal: str) -> bool:
    try:
        # compared by name: a `stat` could wait for a file system that the program itself serves
        name = str(descriptor.readlink())
    except OSError:
        return False
    return name == terminal or name.endswith(_OWN_TERMINAL)

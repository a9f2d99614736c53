"""A shell's terminal, from the side of its user: typing, echo, and the foreground process group."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

from ptyprocess import PtyProcess

_ROWS, _COLUMNS = 50, 200
_INPUT_FLAGS, _OUTPUT_FLAGS, _LOCAL_FLAGS = 0, 1, 3
# TIOCGPTPEER, since Linux 4.13
_OPEN_SLAVE = 0x5441
_SIGNALS = (b"\x03", b"\x1c", b"\x1a")
MAX_LINE = 4095
"""Maximum length of a line on a terminal in bytes, unless the program reads key by key."""


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

"""The terminal of a shell, from its typing end: the treatment of what is typed, and the foreground process group."""

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
"""Bytes of a line that a terminal takes, unless the program reads key by key."""


class Terminal:
    """Both ends of a new terminal; `slave` is for the program, and is closed here once that has it."""

    def __init__(self) -> None:
        self.fd, self.slave = os.openpty()
        os.set_blocking(self.fd, False)
        self.name = str(Path(f"/proc/self/fd/{self.slave}").readlink())
        self._process: PtyProcess | None = None
        attributes = termios.tcgetattr(self.slave)
        # no carriage returns in what is read, and ^S does not stop it
        attributes[_OUTPUT_FLAGS] &= ~termios.ONLCR
        attributes[_INPUT_FLAGS] &= ~termios.IXON
        # else ^C throws away what was written and not yet read
        attributes[_LOCAL_FLAGS] |= termios.NOFLSH
        self._seen = attributes
        self._unseen = [*attributes]
        self._unseen[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHONL)
        self.hide()

    def hand_over(self, pid: int) -> None:
        """Close `slave`, as the program has it, and set the window size."""
        os.close(self.slave)
        self.slave = -1
        self._process = PtyProcess(pid, self.fd)
        self._process.setwinsize(_ROWS, _COLUMNS)

    def show(self) -> None:
        """Echo what is typed, as users expect."""
        self._set(self._seen)

    def hide(self) -> None:
        """Do not echo what is typed, and let it send signals even if a program had switched that off."""
        self._set(self._unseen)

    def forget(self) -> None:
        """Drop what was typed and not read: what is on its way, then what has arrived."""
        # never by TCSAFLUSH: in the kernel that waits for ever for a program which is in the midst of writing
        with contextlib.suppress(OSError, termios.error):
            termios.tcflush(self.fd, termios.TCOFLUSH)
            with self._program_end() as slave:
                termios.tcflush(slave, termios.TCIFLUSH)

    def has_unread(self) -> bool:
        """Return whether something was typed, a whole line if it takes lines, that no program has read yet."""
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
        """Return whether a program is given whole lines, and not every key."""
        return self._has(termios.ICANON)

    def is_signal(self, keys: bytes) -> bool:
        """Return whether the first of the keys is ^C, ^backslash or ^Z, and sends its signal."""
        return keys[:1] in _SIGNALS and self._has(termios.ISIG)

    def _has(self, flag: int) -> bool:
        try:
            return bool(termios.tcgetattr(self.fd)[_LOCAL_FLAGS] & flag)
        except termios.error:
            return False

    def type(self, keys: bytes) -> int:
        """Type as many of the keys as the terminal takes now; return their number."""
        try:
            return os.write(self.fd, keys)
        except OSError:
            return 0

    def read(self) -> bytes | None:
        """Read some of what was written to it; empty if there is nothing now, None if nothing can come any more."""
        try:
            return os.read(self.fd, 65536) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def foreground_group(self) -> int:
        """Return the process group, on the host, that ^C goes to; 0 if there is none."""
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
            # its own close() would wait for a child of ours, which the program is not
            self._process.fileobj.close()
            self._process.closed = True
        self.fd = self.slave = -1

# ruff: noqa: PTH115, PTH123
"""A system call of another process that waits for its answer, and access to that process. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator

_VALID = 0x40082102
_PATH_MAX = _PAGE = 4096
_SHORT = 256
CWD, NO_FOLLOW, EMPTY_PATH = -100, 0x100, 0x1000
MISSING, OF_KERNEL = -1, -2
_KERNEL_FOLDERS = (b"proc", b"dev", b"sys")


_libc = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    """An `iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class WaitingCall:
    """One intercepted call: its id and its thread. All methods raise OSError if the thread has ended."""

    __slots__ = ("_listener", "number", "thread")

    def __init__(self, listener: int, number: int, thread: int) -> None:
        self._listener = listener
        self.number = number
        self.thread = thread

    def status(self, name: bytes) -> bytes:
        """Return the value of a line in /proc/PID/status."""
        with open(f"/proc/{self.thread}/status", "rb") as file:
            return next(line for line in file if line.startswith(name)).split()[1]

    def is_in_another_root(self) -> bool:
        """Return whether the process has changed its root folder by chroot."""
        return os.readlink(b"/proc/%d/root" % self.thread) != b"/"

    @contextlib.contextmanager
    def opened(self, folder: int, path: int, flags: int) -> Iterator[int]:
        """Yield an O_PATH descriptor of the call's file, MISSING, or OF_KERNEL for a file of /proc, /dev or /sys."""
        name = self.path(path) if path else b""
        file = MISSING
        if name or flags & EMPTY_PATH:
            place = self.place(folder, name)
            if not place:
                file = OF_KERNEL
            else:
                no_follow = os.O_NOFOLLOW if name and flags & NO_FOLLOW else 0
                with contextlib.suppress(OSError):
                    file = os.open(place, os.O_PATH | os.O_CLOEXEC | no_follow)
        try:
            yield file
        finally:
            if file >= 0:
                os.close(file)

    def read(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes of the process's memory."""
        buffer = ctypes.create_string_buffer(size)
        here, there = _Piece(ctypes.addressof(buffer), size), _Piece(address, size)
        n = _libc.process_vm_readv(self.thread, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if n < 0:
            raise OSError(ctypes.get_errno(), "memory")
        return buffer.raw[:n]

    def write(self, address: int, data: bytes) -> None:
        """Write into the process's memory."""
        with open(f"/proc/{self.thread}/mem", "r+b", 0) as memory:
            # fails if the call has ended, because the thread id can belong to another process by now
            fcntl.ioctl(self._listener, _VALID, struct.pack("Q", self.number))
            os.pwrite(memory.fileno(), data, address)

    def path(self, address: int) -> bytes:
        """Return the path at an address of the process's memory."""
        # read up to the end of the page, because the next one may be unmapped; most paths are short
        in_page = _PAGE - address % _PAGE
        data = self.read(address, min(in_page, _SHORT))
        for more in (in_page - len(data), _PATH_MAX):
            if b"\0" in data:
                break
            data += self.read(address + len(data), more) if more else b""
        name, end, _ = data.partition(b"\0")
        if not end or len(name) >= _PATH_MAX:
            raise OSError(errno.ENAMETOOLONG, "path")
        return name

    def place(self, folder: int, name: bytes) -> bytes:
        """Return the path by which this process reaches a file of the other; empty for files of the kernel."""
        if name.startswith(b"/"):
            if name.split(b"/", 2)[1] in _KERNEL_FOLDERS:
                return b""
            return b"/proc/%d/root" % self.thread + name
        number = ctypes.c_int(folder & 0xFFFFFFFF).value
        if number < 0 and number != CWD:
            raise OSError(errno.EBADF, "folder")
        link = b"cwd" if number == CWD else b"fd/%d" % number
        return b"/proc/%d/%s" % (self.thread, link) + (b"/" + name if name else b"")

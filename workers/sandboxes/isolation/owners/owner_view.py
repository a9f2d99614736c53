# ruff: noqa: PTH115, PTH123
"""A process beside a program of a sandbox, which answers its changes of owner and its questions for owners; standard
library only.

The kernel knows one user in there, and gives no other without rights that an ordinary user of a node has not. So the
filter of system calls sends these few calls here (`seccomp_unotify(2)`): a change of owner is noted on the file, and
`stat` shows what is noted. Nothing is preloaded, so it holds for static programs too. It is a view, and no wall: whose
a file is decides about no access. All other calls are the kernel's, and so are these for files without a note.

It runs inside, with the rights of a program there and the one to read the memory of others, under the same filter; it
ends with the last process that it answers. A program that kills it has no more owners, nor `stat`: so it heeds no other
signal, and has a name of its own, as policies end what they have started by `pkill python`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct

from workers.sandboxes.isolation import linux, seccomp, system_calls
from workers.sandboxes.isolation.owners import file_owners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_RECEIVE, _SEND, _VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTICE, _REPLY = struct.Struct("QIIiIQ6Q"), struct.Struct("Qqii")
_CONTINUE = 1
_PATH_MAX = 4096
_CWD, _NO_FOLLOW, _EMPTY_PATH = -100, 0x100, 0x1000
_NAME = "farm-owners"
_MISSING, _OF_KERNEL = -1, -2
_KERNEL_S = (b"proc", b"dev", b"sys")
_STATUS_BYTES, _MORE_BYTES = {"x86_64": 144, "aarch64": 128}, 256
_OWNER_AT, _OWNER_AT_MORE = {"x86_64": 28, "aarch64": 24}, 20
"""The place of uid and gid in what `stat` and `statx` tell."""

_libc = ctypes.CDLL(None, use_errno=True)


def start_view() -> socket.socket | None:
    """Start one, not as a child of this process; returns where it takes a filter's listener. None if it cannot be."""
    ours, theirs = socket.socketpair()
    try:
        between = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if between == 0:
        try:
            if os.fork() == 0:
                _live(theirs.detach())
        finally:
            os._exit(0)
    theirs.close()
    os.waitpid(between, 0)
    return ours


def _live(connection: int) -> None:
    os.setsid()
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(each, signal.SIG_IGN)
    linux.show_as([_NAME], _NAME)
    for number in (0, 1, 2):
        os.dup2(os.open("/dev/null", os.O_RDWR), number)
    os.dup2(connection, 3)
    os.closerange(4, (1 << 31) - 1)
    _, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=3), 1, 1)
    if descriptors:
        linux.keep_only_docker_capabilities(linux.SYS_PTRACE)
        linux.no_new_privileges()
        seccomp.filter_calls(fake_root=False)
        OwnerView(descriptors[0]).serve()


class OwnerView:
    """Answers the calls of one filter."""

    def __init__(self, listener: int) -> None:
        machine = platform.machine()
        listed = {**system_calls.numbers(system_calls.OWNERS, machine)}
        listed |= system_calls.numbers(system_calls.STATUS, machine)
        self._listener = listener
        self._names = {number: name for name, number in listed.items()}
        self._numbers = listed
        self._status_bytes, self._owner_at = _STATUS_BYTES[machine], _OWNER_AT[machine]

    def serve(self) -> None:
        """Until no process is left that has the filter."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        notice = bytearray(_NOTICE.size)
        while any(event & select.POLLIN for _, event in poll.poll()):
            notice[:] = bytes(_NOTICE.size)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, notice)
            except OSError:
                # who asked has ended
                continue
            call, thread, _, number, _, _, *arguments = _NOTICE.unpack(notice)
            reply = _REPLY.pack(call, 0, 0, _CONTINUE)
            # an address may be beyond all memory
            with contextlib.suppress(OSError, ValueError, OverflowError):
                if self._answer(call, thread, self._names[number], arguments):
                    reply = _REPLY.pack(call, 0, 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._listener, _SEND, reply)

    def _answer(self, call: int, thread: int, name: str, arguments: list[int]) -> bool:
        """Do what a call asks for; False if the kernel is to. Raises OSError if it cannot be done."""
        first, second, third, fourth, fifth, _ = arguments
        if name in ("chown", "lchown"):
            return self._note(thread, _CWD, first, 0 if name == "chown" else _NO_FOLLOW, second, third)
        if name == "fchown":
            return self._note(thread, first, 0, _EMPTY_PATH, second, third)
        if name == "fchownat":
            return self._note(thread, first, second, fifth, third, fourth)
        if name in ("stat", "lstat"):
            return self._tell(call, thread, _CWD, first, 0 if name == "stat" else _NO_FOLLOW, second)
        if name == "fstat":
            return self._tell(call, thread, first, 0, _EMPTY_PATH, second)
        if name == "newfstatat":
            return self._tell(call, thread, first, second, fourth, third)
        return self._tell(call, thread, first, second, third, fifth, mask=fourth)

    def _note(self, thread: int, folder: int, path: int, flags: int, uid: int, gid: int) -> bool:
        with self._opened(thread, folder, path, flags) as file:
            if file < 0:
                # the kernel says why, of a path that is not there; its own files stay as they are
                return file == _OF_KERNEL
            file_owners.note_owner(f"/proc/self/fd/{file}", uid & 0xFFFFFFFF, gid & 0xFFFFFFFF, "/")
            return True

    def _tell(
        self, call: int, thread: int, folder: int, path: int, flags: int, target: int, mask: int | None = None
    ) -> bool:
        with self._opened(thread, folder, path, flags) as file:
            noted = None if file < 0 else file_owners.owner_of(f"/proc/self/fd/{file}")
            if noted is None:
                return False
            if mask is None:
                buffer, at = ctypes.create_string_buffer(self._status_bytes), self._owner_at
                done = _libc.syscall(self._numbers["newfstatat"], file, b"", buffer, _EMPTY_PATH)
            else:
                buffer, at = ctypes.create_string_buffer(_MORE_BYTES), _OWNER_AT_MORE
                asked = (flags & 0x6000) | _EMPTY_PATH
                done = _libc.syscall(self._numbers["statx"], file, b"", asked, ctypes.c_uint(mask & 0xFFFFFFFF), buffer)
            if done < 0:
                raise OSError(ctypes.get_errno(), "stat")
            struct.pack_into("II", buffer, at, *noted)
            with open(f"/proc/{thread}/mem", "r+b", 0) as memory:
                # the number may be another's by now
                fcntl.ioctl(self._listener, _VALID, struct.pack("Q", call))
                os.pwrite(memory.fileno(), buffer.raw, target)
            return True

    @contextlib.contextmanager
    def _opened(self, thread: int, folder: int, path: int, flags: int) -> Iterator[int]:
        """Yield what another process names, only to be looked at; _MISSING, or _OF_KERNEL."""
        name = self._path(thread, path) if path else b""
        file = _MISSING
        if name or flags & _EMPTY_PATH:
            place = self._place(thread, folder, name)
            if not place:
                file = _OF_KERNEL
            else:
                no_follow = os.O_NOFOLLOW if name and flags & _NO_FOLLOW else 0
                with contextlib.suppress(OSError):
                    file = os.open(place, os.O_PATH | os.O_CLOEXEC | no_follow)
        try:
            yield file
        finally:
            if file >= 0:
                os.close(file)

    def _path(self, thread: int, address: int) -> bytes:
        with open(f"/proc/{thread}/mem", "rb", 0) as memory:
            # not beyond the page, where there may be nothing
            first = min(_PATH_MAX, _PATH_MAX - address % _PATH_MAX)
            data = os.pread(memory.fileno(), first, address)
            if b"\0" not in data:
                data += os.pread(memory.fileno(), _PATH_MAX, address + first)
        name, end, _ = data.partition(b"\0")
        if not end or len(name) >= _PATH_MAX:
            raise OSError(errno.ENAMETOOLONG, "path")
        return name

    def _place(self, thread: int, folder: int, name: bytes) -> bytes:
        """Return the path by which this process reaches what another names; empty if it is the kernel's."""
        if name.startswith(b"/"):
            if name.split(b"/", 2)[1] in _KERNEL_S:
                return b""
            root = os.readlink(b"/proc/%d/root" % thread)
            return name if root == b"/" else root + name
        number = ctypes.c_int(folder & 0xFFFFFFFF).value
        if number < 0 and number != _CWD:
            raise OSError(errno.EBADF, "folder")
        where = b"cwd" if number == _CWD else b"fd/%d" % number
        return b"/proc/%d/%s" % (thread, where) + (b"/" + name if name else b"")

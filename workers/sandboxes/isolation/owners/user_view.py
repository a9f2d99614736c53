"""A process that answers a program's system calls about users and owners in its sandbox. Standard library only.

The kernel knows one user in a sandbox, and more would need rights that an ordinary user of a node does not have. So the
seccomp filter sends these few calls here (`seccomp_unotify(2)`): a process that changes its user gets the result of
such a change, a change of owner is recorded on the file, files created by a user other than root are recorded as that
user's, and `stat` shows the recorded owner. Nothing is preloaded, so it works for static programs, too. It is only a
view: users and owners affect these calls, but not access to files. The kernel handles all other calls.

The process runs inside the sandbox with the rights of a program there plus the right to read other processes' memory,
under the same filter, and ends with the last process that it serves. Without it, these programs could not start others.
Therefore `kill` skips it, it ignores all signals that can be ignored, and it has a name of its own.
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
import stat
import struct
from collections.abc import Iterator, Sequence

from workers.sandboxes.isolation import linux, seccomp, system_calls
from workers.sandboxes.isolation.owners import file_owners
from workers.sandboxes.isolation.owners.credentials import (
    UNCHANGED,
    Credentials,
    CredentialsTable,
    shown,
    user_of_address,
)

_VALID = 0x40082102
_PATH_MAX = _PAGE = 4096
_SHORT = 256
CWD, NO_FOLLOW, EMPTY_PATH = -100, 0x100, 0x1000
MISSING, OF_KERNEL = -1, -2
_KERNEL_FOLDERS = (b"proc", b"dev", b"sys")

_RECEIVE, _SEND, _GIVE = 0xC0502100, 0xC0182101, 0x40182103
_SET_FLAGS, _WAKE_HERE = 0x40082104, 1
_NOTICE, _REPLY, _DESCRIPTOR = struct.Struct("QIIiIQ6Q"), struct.Struct("Qqii"), struct.Struct("QIIII")
_CONTINUE = 1
_NAME = "farm-owners"
_STATUS_BYTES, _MORE_BYTES = {"x86_64": 144, "aarch64": 128}, 256
_OWNER_AT, _OWNER_AT_MORE = {"x86_64": 28, "aarch64": 24}, 20
"""Offset of uid and gid in the results of `stat` and `statx`."""
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
_PEER = struct.Struct("iII")
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_MAX_GROUPS = 65536
_ALL, _PASSES = -1, 3
_MINE = {"getuid": 0, "geteuid": 1}
_MY_GROUPS = {"getgid": 0, "getegid": 1}

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

    @contextlib.contextmanager
    def opened(self, folder: int, path: int, flags: int) -> Iterator[int]:
        """Yield an O_PATH descriptor of the call's file, MISSING, or OF_KERNEL for a file of /proc, /dev or /sys."""
        name = self.path(path) if path else b""
        file = MISSING
        if name or flags & EMPTY_PATH:
            proc_path = self.proc_path(folder, name)
            if not proc_path:
                file = OF_KERNEL
            else:
                no_follow = os.O_NOFOLLOW if name and flags & NO_FOLLOW else 0
                with contextlib.suppress(OSError):
                    file = os.open(proc_path, os.O_PATH | os.O_CLOEXEC | no_follow)
        try:
            yield file
        finally:
            if file >= 0:
                os.close(file)

    def read(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes of the process's memory."""
        buffer = ctypes.create_string_buffer(size)
        local, remote = _Piece(ctypes.addressof(buffer), size), _Piece(address, size)
        n = _libc.process_vm_readv(self.thread, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
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

    def proc_path(self, folder: int, name: bytes) -> bytes:
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


def start_view(first: Credentials) -> socket.socket | None:
    """Start a view, not as a child of this process. Returns the socket that accepts a filter's listener, or None.

    `first` are the credentials of the first program that it serves.
    """
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
                _live(theirs.detach(), first)
        finally:
            os._exit(0)
    theirs.close()
    os.waitpid(between, 0)
    return ours


def _live(connection: int, first: Credentials) -> None:
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
        seccomp.filter_calls(seccomp.ANSWERS)
        UserView(descriptors[0], first).serve()


def _answers(process: int) -> bool:
    """Return whether a process is a view: only a view has the right to read other processes' memory."""
    try:
        with open(f"/proc/{process}/status", "rb") as file:
            rights = next(line for line in file if line.startswith(b"CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(rights.split()[1], 16) >> linux.SYS_PTRACE & 1)


class UserView:
    """Answers the calls of one filter."""

    def __init__(self, listener: int, first: Credentials) -> None:
        machine = platform.machine()
        self._listener = listener
        self._numbers = system_calls.numbers(seccomp.ANSWERED, machine)
        self._names = {number: name for name, number in self._numbers.items()}
        self._status_bytes, self._owner_at = _STATUS_BYTES[machine], _OWNER_AT[machine]
        self._table = CredentialsTable(first)

    def serve(self) -> None:
        """Answer calls until no process with the filter is left."""
        # wake the process on the CPU of the caller, which is twice as fast; since Linux 6.6
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SET_FLAGS, _WAKE_HERE)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        notice = bytearray(_NOTICE.size)
        while any(event & select.POLLIN for _, event in poll.poll()):
            notice[:] = bytes(_NOTICE.size)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, notice)
            except OSError:
                # the calling process has ended
                continue
            call, thread, _, number, _, _, *arguments = _NOTICE.unpack(notice)
            reply = _REPLY.pack(call, 0, 0, _CONTINUE)
            # an address can be outside the address space
            with contextlib.suppress(OSError, ValueError, OverflowError):
                answer = self._answer(WaitingCall(self._listener, call, thread), self._names[number], arguments)
                if answer is not None:
                    reply = _REPLY.pack(call, max(answer, 0), min(answer, 0), 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._listener, _SEND, reply)

    def _answer(self, call: WaitingCall, name: str, arguments: list[int]) -> int | None:
        """Execute a call. Returns its result, a negative error number, or None if the kernel must execute it.

        A raised OSError also means that the kernel must execute it.
        """
        first, second, third, fourth, fifth, _ = arguments
        match name:
            case "chown" | "lchown":
                return self._note(call, CWD, first, 0 if name == "chown" else NO_FOLLOW, second, third)
            case "fchown":
                return self._note(call, first, 0, EMPTY_PATH, second, third)
            case "fchownat":
                return self._note(call, first, second, fifth, third, fourth)
            case "stat" | "lstat":
                return self._tell(call, CWD, first, 0 if name == "stat" else NO_FOLLOW, second)
            case "fstat":
                return self._tell(call, first, 0, EMPTY_PATH, second)
            case "newfstatat":
                return self._tell(call, first, second, fourth, third)
            case "statx":
                return self._tell(call, first, second, third, fifth, mask=fourth)
            case "open":
                return self._make_file(call, CWD, first, second, third)
            case "creat":
                return self._make_file(call, CWD, first, _CREATES, second)
            case "openat":
                return self._make_file(call, first, second, third, fourth)
            case "openat2":
                flags, mode, resolve = struct.unpack("3Q", call.read(third, 24))
                return self._make_file(call, first, second, flags, mode) if flags & os.O_CREAT and not resolve else None
            case "mkdir":
                return self._make_folder(call, CWD, first, second)
            case "mkdirat":
                return self._make_folder(call, first, second, third)
            case "execve":
                self._begin(call, CWD, first, 0)
                return None
            case "execveat":
                self._begin(call, first, second, fifth)
                return None
            case "prctl":
                self._table.give(call.thread, self._table.of(call.thread).after_control(first, second))
                return None
            case "getsockopt":
                return self._tell_peer(call, first, fourth, fifth)
            case "kill":
                return self._kill(call, ctypes.c_int(first & UNCHANGED).value, second & UNCHANGED)
            case "setgroups":
                return self._set_groups(call, ctypes.c_int(first & UNCHANGED).value, second)
        if name.startswith("get"):
            return self._tell_ids(call, name, arguments)
        return self._set_ids(call, name, arguments)

    def _kill(self, call: WaitingCall, target: int, number: int) -> int | None:
        """Send a signal to all processes except views, which must not be ended or stopped."""
        if target != _ALL:
            return 0 if target and _answers(abs(target)) else None
        spared = (1, int(call.status(b"Tgid")))
        # processes started meanwhile are found by the next pass
        for _ in range(_PASSES if number == signal.SIGKILL else 1):
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                if pid not in spared and not _answers(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
        return 0

    def _set_ids(self, call: WaitingCall, name: str, arguments: Sequence[int]) -> int:
        now = self._table.of(call.thread)
        try:
            self._table.give(call.thread, now.after(name, arguments))
        except OSError as error:
            return -(error.errno or errno.EPERM)
        return {"setfsuid": now.users[3], "setfsgid": now.groups[3]}.get(name, 0)

    def _set_groups(self, call: WaitingCall, count: int, address: int) -> int:
        if not 0 <= count <= _MAX_GROUPS:
            return -errno.EINVAL
        try:
            groups = struct.unpack(f"{count}I", call.read(address, 4 * count)) if count else ()
            self._table.give(call.thread, self._table.of(call.thread).with_others(groups))
        except struct.error:
            return -errno.EFAULT
        except OSError as error:
            return -(error.errno or errno.EPERM)
        return 0

    def _tell_ids(self, call: WaitingCall, name: str, arguments: Sequence[int]) -> int:
        now = self._table.of(call.thread)
        if name in _MINE:
            return now.users[_MINE[name]]
        if name in _MY_GROUPS:
            return now.groups[_MY_GROUPS[name]]
        if name == "getgroups":
            size = ctypes.c_int(arguments[0] & UNCHANGED).value
            if size < 0 or 0 < size < len(now.others):
                return -errno.EINVAL
            if size and now.others:
                call.write(arguments[1], struct.pack(f"{len(now.others)}I", *now.others))
            return len(now.others)
        for each, address in zip(now.users if name == "getresuid" else now.groups, arguments[:3], strict=False):
            call.write(address, struct.pack("I", each))
        return 0

    def _tell_peer(self, call: WaitingCall, number: int, target: int, size_at: int) -> int | None:
        process = self._descriptor(_PIDFD_OPEN, int(call.status(b"Tgid")), 0)
        try:
            taken = self._descriptor(_PIDFD_GETFD, process, ctypes.c_int(number & UNCHANGED), 0)
        finally:
            os.close(process)
        with socket.socket(fileno=taken) as duplicate:
            pid, *_ = _PEER.unpack(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            # pid 0 is a process outside this sandbox: a relay, which connects for a process of another sandbox
            ids = shown(pid) if pid else user_of_address(duplicate.getpeername())
        (size,) = struct.unpack("i", call.read(size_at, 4))
        if ids in (None, (0, 0)) or size < _PEER.size:
            return None
        call.write(target, _PEER.pack(pid, *ids))
        call.write(size_at, struct.pack("i", _PEER.size))
        return 0

    def _descriptor(self, number: int, *arguments: object) -> int:
        descriptor = _libc.syscall(number, *arguments)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), "pidfd")
        return int(descriptor)

    def _begin(self, call: WaitingCall, folder: int, path: int, flags: int) -> None:
        """Record a process's users after an exec, which the kernel executes."""
        now = self._table.of(call.thread)
        if now.users[1] == 0:
            uid = gid = None
        else:
            uid, gid = self._set_id_of(call, folder, path, flags)
        new = now.after_exec(uid, gid)
        if new.key() != now.key():
            self._table.give(call.thread, new)

    def _set_id_of(self, call: WaitingCall, folder: int, path: int, flags: int) -> tuple[int | None, int | None]:
        """Return the user and group that a set-id program gets; None for those that do not change."""
        with call.opened(folder, path, flags) as file:
            mode = os.fstat(file).st_mode if file >= 0 else 0
            if not (stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID) and mode & 0o111):
                return None, None
            with open(f"/proc/self/fd/{file}", "rb", 0) as program:
                if program.read(2) == b"#!":
                    return None, None
            uid, gid = file_owners.owner_of(f"/proc/self/fd/{file}") or file_owners.ROOT
            return uid if mode & stat.S_ISUID else None, gid if mode & stat.S_ISGID else None

    def _make_file(self, call: WaitingCall, folder: int, path: int, flags: int, mode: int) -> int | None:
        owner = self._table.of(call.thread).owner
        proc_path = self._new(call, folder, path, flags & (os.O_EXCL | os.O_NOFOLLOW)) if owner != (0, 0) else b""
        if not proc_path:
            return None
        owner = file_owners.owner_in(proc_path, owner)
        with self._umask_of(call):
            file = os.open(proc_path, flags & 0x7FFFFFFF | os.O_EXCL | os.O_CLOEXEC, mode & 0o7777)
        try:
            file_owners.note_owner(f"/proc/self/fd/{file}", *owner, "/")
            close = flags & os.O_CLOEXEC
            return int(fcntl.ioctl(self._listener, _GIVE, bytearray(_DESCRIPTOR.pack(call.number, 0, file, 0, close))))
        except OSError:
            # the process has no free descriptor or has ended: undo everything
            os.unlink(proc_path)
            raise
        finally:
            os.close(file)

    def _make_folder(self, call: WaitingCall, folder: int, path: int, mode: int) -> int | None:
        owner = self._table.of(call.thread).owner
        proc_path = self._new(call, folder, path, os.O_NOFOLLOW) if owner != (0, 0) else b""
        if not proc_path:
            return None
        owner = file_owners.owner_in(proc_path, owner)
        with self._umask_of(call):
            os.mkdir(proc_path, mode & 0o7777)
        file = os.open(proc_path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file_owners.note_owner(f"/proc/self/fd/{file}", *owner, "/")
        finally:
            os.close(file)
        return 0

    def _new(self, call: WaitingCall, folder: int, path: int, no_follow: int) -> bytes:
        """Return the path to a file that a process is about to create; empty if the kernel must execute the call."""
        name = call.path(path)
        # the process may have changed its root folder by chroot
        if not name or os.readlink(b"/proc/%d/root" % call.thread) != b"/":
            return b""
        proc_path = call.proc_path(folder, name)
        try:
            os.close(os.open(proc_path, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if no_follow else 0)))
        except FileNotFoundError:
            return proc_path
        return b""

    @contextlib.contextmanager
    def _umask_of(self, call: WaitingCall) -> Iterator[None]:
        before = os.umask(int(call.status(b"Umask"), 8))
        try:
            yield
        finally:
            os.umask(before)

    def _note(self, call: WaitingCall, folder: int, path: int, flags: int, uid: int, gid: int) -> int | None:
        with call.opened(folder, path, flags) as file:
            if file < 0:
                # for a missing path, the kernel returns the error; the kernel's own files do not change
                return 0 if file == OF_KERNEL else None
            proc_path, uid, gid = f"/proc/self/fd/{file}", uid & UNCHANGED, gid & UNCHANGED
            if not self._table.of(call.thread).may_give(file_owners.owner_of(proc_path) or file_owners.ROOT, uid, gid):
                return -errno.EPERM
            file_owners.note_owner(proc_path, uid, gid, "/")
            file_owners.clear_set_id(proc_path)
            return 0

    def _is_noted(self, call: WaitingCall, folder: int, path: int, flags: int) -> bool:
        """Return whether an owner is recorded for a file. Called most often, and false for nearly all files."""
        name = call.path(path) if path else b""
        proc_path = call.proc_path(folder, name) if name or flags & EMPTY_PATH else b""
        follow = not (name and flags & NO_FOLLOW)
        return bool(proc_path) and file_owners.owner_at(proc_path, follow=follow) is not None

    def _tell(
        self, call: WaitingCall, folder: int, path: int, flags: int, target: int, mask: int | None = None
    ) -> int | None:
        if not self._is_noted(call, folder, path, flags):
            return None
        with call.opened(folder, path, flags) as file:
            noted = None if file < 0 else file_owners.owner_of(f"/proc/self/fd/{file}")
            if noted is None:
                return None
            if mask is None:
                buffer, at = ctypes.create_string_buffer(self._status_bytes), self._owner_at
                done = _libc.syscall(self._numbers["newfstatat"], file, b"", buffer, EMPTY_PATH)
            else:
                buffer, at = ctypes.create_string_buffer(_MORE_BYTES), _OWNER_AT_MORE
                wanted = (flags & 0x6000) | EMPTY_PATH
                done = _libc.syscall(self._numbers["statx"], file, b"", wanted, ctypes.c_uint(mask & UNCHANGED), buffer)
            if done < 0:
                raise OSError(ctypes.get_errno(), "stat")
            struct.pack_into("II", buffer, at, *noted)
            call.write(target, buffer.raw)
            return 0

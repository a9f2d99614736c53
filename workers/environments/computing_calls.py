"""System call filters for a process that handles a policy's text: it may compute and read files, all else fails.

Allow-lists by seccomp: no processes, threads, signals to others, sockets, traces, or writes except to open descriptors,
whatever code the interpreter runs. Unlike the filters of sandboxes they are for known programs: a scorer of the grader,
and a rollout in a shared environment server. Standard library only, as it is also loaded in the sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 1, 4, 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_DUPFD_CLOEXEC: none that sends signals to an owner.
_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX: none that types into a terminal or sets an owner.
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

_Line = tuple[int, int, int, int]
"""Kind, lines to skip if the test is true, lines to skip if it is false, value."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """The call numbers of one machine. `computing` and `serving` are allowed; the others are checked by argument.

    computing: read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64
    readv sched_yield mremap madvise getitimer setitimer getpid exit uname getcwd gettimeofday getrlimit getrusage
    sysinfo times getuid getgid geteuid getegid sigaltstack gettid futex sched_getaffinity getdents64 clock_gettime
    clock_getres exit_group newfstatat readlinkat faccessat getrandom statx rseq; x86-64 has stat lstat access alarm
    readlink time, too.

    serving: writev dup dup3 pipe2 pselect6 ppoll nanosleep clock_nanosleep recvfrom shutdown getsockname getpeername
    getsockopt socketpair getppid epoll_create1 epoll_ctl epoll_pwait eventfd2 membarrier fadvise64 statfs fstatfs
    set_robust_list restart_syscall; x86-64 has poll select pipe dup2 epoll_wait, too.
    """

    audit_architecture: int
    openat: int
    ioctl: int
    fcntl: int
    sendto: int
    computing: str
    serving: str


_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(
        *(0xC000003E, 257, 16, 72, 44),
        "0 1 3 5 8 9 10 11 12 13 14 15 17 19 24 25 28 36 38 39 60 63 79 96 97 98 99 100 102 104 107 108 131 186 202 "
        "204 217 228 229 231 262 267 269 318 332 334 4 6 21 37 89 201",
        "20 32 292 293 270 271 35 230 45 48 51 52 55 53 110 291 233 281 290 324 221 137 138 273 219 7 23 22 33 232",
    ),
    "aarch64": _Machine(
        *(0xC00000B7, 56, 29, 25, 206),
        "63 64 57 80 62 222 226 215 214 134 135 139 67 65 124 216 233 102 103 172 93 160 17 169 163 165 179 153 174 "
        "176 175 177 132 178 98 123 61 113 114 94 79 78 48 278 291 293",
        "66 23 24 59 72 73 101 115 207 210 204 205 209 199 173 20 21 22 19 283 223 43 44 99 128",
    ),
}


def can_filter() -> bool:
    """Return whether the call numbers of this machine are known."""
    return platform.machine() in _MACHINES


def allow_only_computing() -> bool:
    """Restrict this process to computing, reading files, and writing to open descriptors. Needs no_new_privs, or root.

    Return False if the machine or its kernel has no such filter.
    """
    return can_filter() and _install(_lines(_MACHINES[platform.machine()], serving=False))


def allow_only_serving() -> bool:
    """Also allow waiting, sleeping, and answering on its connections. Permanent. Return False as above."""
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return can_filter() and _install(_lines(_MACHINES[platform.machine()], serving=True))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of user clears this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Protect the memory and descriptors of this process, and of its forks, from processes of the same user."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _lines(machine: _Machine, *, serving: bool) -> Sequence[_Line]:
    """Return the filter: first the architecture, then the calls that depend on an argument, then the allowed ones."""
    checked = {
        machine.openat: (_argument(2), (_ANY_BIT, 0, 1, _WRITES), *_refuse(), *_allow()),
        machine.fcntl: _one_of(_DESCRIPTOR_COMMANDS),
        machine.ioctl: _one_of(_DEVICE_COMMANDS),
    }
    numbers = machine.computing.split()
    if serving:
        # Only to its peer: an address has two halves.
        halves = [line for half in (0, 1) for line in (_argument(4, half), (_EQUAL, 1, 0, 0), *_refuse())]
        checked[machine.sendto] = (*halves, *_allow())
        numbers += machine.serving.split()
    bodies = [((_EQUAL, 0, len(body), number), *body) for number, body in checked.items()]
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, machine.audit_architecture),
        *_refuse(),
        (_LOAD, 0, 0, _NUMBER_AT),
        *(line for body in bodies for line in body),
        *((_EQUAL, len(numbers) - at, 0, int(number)) for at, number in enumerate(numbers)),
        *_refuse(),
        *_allow(),
    ]


def _one_of(values: Sequence[int]) -> tuple[_Line, ...]:
    n = len(values)
    return (_argument(1), *((_EQUAL, n - at, 0, value) for at, value in enumerate(values)), *_refuse(), *_allow())


def _argument(number: int, half: int = 0) -> _Line:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * number + 4 * half)


def _allow() -> tuple[_Line]:
    return ((_RETURN, 0, 0, _ALLOW),)


def _refuse() -> tuple[_Line]:
    return ((_RETURN, 0, 0, _ERRNO | errno.EPERM),)


def _install(lines: Sequence[_Line]) -> bool:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    return bool(ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) == 0)

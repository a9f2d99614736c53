"""A filter for the system calls of a scorer: those of a program that computes and reads files; all others fail.

An allow-list, by seccomp: no process, thread, signal, socket, trace or write outside of its pipe, whatever code the
interpreter runs. Unlike that of sandboxes it is for one known program. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _THIRD_ARGUMENT_AT = 0, 4, 32
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn ioctl pread64 readv
# sched_yield mremap madvise getitimer setitimer getpid exit uname fcntl getcwd gettimeofday getrlimit getrusage sysinfo
# times getuid getgid geteuid getegid sigaltstack gettid futex sched_getaffinity getdents64 clock_gettime clock_getres
# exit_group newfstatat readlinkat faccessat getrandom statx rseq; x86-64 has stat lstat access alarm readlink time, too
_X86_64 = (
    "0 1 3 5 8 9 10 11 12 13 14 15 16 17 19 24 25 28 36 38 39 60 63 72 79 96 97 98 99 100 102 104 107 108 131 186 202 "
    "204 217 228 229 231 262 267 269 318 332 334 4 6 21 37 89 201"
)
_AARCH64 = (
    "63 64 57 80 62 222 226 215 214 134 135 139 29 67 65 124 216 233 102 103 172 93 160 25 17 169 163 165 179 153 174 "
    "176 175 177 132 178 98 123 61 113 114 94 79 78 48 278 291 293"
)
_MACHINES = {"x86_64": (0xC000003E, 257, _X86_64), "aarch64": (0xC00000B7, 56, _AARCH64)}
"""The audit architecture, the number of openat, and the allowed numbers."""


def allow_only_computing() -> bool:
    """Filter the calls of this process; needs no_new_privs. Return False on an unknown architecture."""
    if platform.machine() not in _MACHINES:
        return False
    architecture, open_at, numbers = _MACHINES[platform.machine()]
    allowed = [int(number) for number in numbers.split()]
    n = len(allowed)
    # the second and third field: instructions to skip if the test is true, and if it is false
    lines = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 0, n + 2, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_EQUAL, n + 1, 0, open_at),
        *((_EQUAL, n + 3 - at, 0, number) for at, number in enumerate(allowed)),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _THIRD_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _WRITES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return _install(lines)


def _install(lines: list[tuple[int, int, int, int]]) -> bool:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    return bool(ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) == 0)

"""Restrict the system calls of a sandbox's processes by a seccomp filter. Standard library only.

A call that is not listed in `system_calls.py` fails with ENOSYS, so that programs fall back to an older call; new calls
of a kernel are closed until they are listed. A call that needs a right that no process inside has fails with EPERM. A
call that can do more than programs need is allowed for listed arguments only. 32-bit and x32 programs have no calls.

Allowed sockets: Unix, IPv4 and IPv6 (TCP, UDP, ICMP), netlink routes. Network namespaces do not separate vsock, which
leads to the hypervisor, and some other families; rare families also are little reviewed parts of the kernel.

A sandbox without root on the host has one user. Changes of owner or user could only fail, which installers treat as an
error. In a sandbox with users these calls are sent to `owners/user_view.py`.

The filter runs at each call, so it finds the number by binary search; since Linux 5.11 the kernel caches the numbers
that are always allowed. Filters are assembled once, in the process that the others are forked from.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from functools import cache

from workers.sandboxes.isolation import system_calls
from workers.sandboxes.isolation.linux import prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    Line: TypeAlias = tuple[int, int, int, int]
    """Instruction, value, lines to skip if it is true, lines to skip if it is false."""

# linux/seccomp.h, linux/audit.h, linux/bpf_common.h
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO, _ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
_ARCH_AT, _NUMBER_AT, _ARGUMENTS_AT = 4, 0, 16
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""First number of the x32 calls on x86-64, which are no longer used."""

_MISSING, _REFUSED, _DONE = _ERRNO | errno.ENOSYS, _ERRNO | errno.EPERM, _ERRNO
_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, UNAME26, both, ADDR_NO_RANDOMIZE (for debuggers), and the query of the current one."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""Default, ICMP, TCP, UDP and ICMPv6."""
_NETLINK_ROUTE = 0
_TRACE_ME = 0
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _NEW_LISTENER, _KILLABLE = 1, 8, 32
KEPT, SHOWN = "kept", "shown"
"""Variants for users. KEPT: owners are recorded. SHOWN: programs also see the recorded owners."""
ANSWERS = "answers"
"""Variant for the process that answers the calls of a sandbox with users."""
ANSWERED = ", ".join(
    group.strip().rstrip(",")
    for group in (
        system_calls.IDS,
        system_calls.USERS,
        system_calls.OWNERS,
        system_calls.STATUS,
        "open 2 -, openat 257 56, openat2 437 437, creat 85 -, mkdir 83 -, mkdirat 258 34",
        "execve 59 221, execveat 322 281, prctl 157 167, getsockopt 55 209, kill 62 129",
    )
)
"""Calls about users and owners, including those that create files or start programs."""
_CREATE = 0o100
_SET_KEEPING, _SET_SECURE_BITS = 8, 28
_SOL_SOCKET, _SO_PEERCRED = 1, 17
_RLIMIT_LOCKS = 10
_VARIANTS = ("", KEPT, SHOWN, ANSWERS)
_libc = ctypes.CDLL(None, use_errno=True)


def filter_calls(variant: str = "") -> None:
    """Filter the calls of this process and its children. Requires `no_new_privileges`. Raises OSError."""
    code = assembled(platform.machine(), variant)
    program = ctypes.create_string_buffer(code)
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, _header(program, code))


def filter_calls_with_users(users: str) -> int:
    """Filter like `filter_calls`. Returns the descriptor on which calls about users must be answered from now on."""
    machine = platform.machine()
    code = assembled(machine, users)
    program = ctypes.create_string_buffer(code)
    # KILLABLE (since Linux 5.19): no signal interrupts a call while it is answered; programs expect no EINTR from
    # `stat`
    for flags in (_NEW_LISTENER | _KILLABLE, _NEW_LISTENER):
        listener = int(_libc.syscall(_SECCOMP[machine], _SET_FILTER, flags, _header(program, code)))
        if listener >= 0 or ctypes.get_errno() != errno.EINVAL:
            break
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


def _header(program: ctypes.Array[ctypes.c_char], code: bytes) -> bytes:
    return struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))


def prepare() -> None:
    """Assemble all variants in advance, for processes that are forked from this one."""
    for variant in _VARIANTS:
        assembled(platform.machine(), variant)


@cache
def assembled(machine: str, variant: str = "") -> bytes:
    """Return the code of a filter variant for a machine as named by `platform.machine()`."""
    lines: list[Line] = [
        (_LOAD, _ARCH_AT, 0, 0),
        (_EQUAL, _ARCH[machine], 1, 0),
        (_RETURN, _MISSING, 0, 0),
        (_LOAD, _NUMBER_AT, 0, 0),
        *([(_AT_LEAST, _X32, 0, 1), (_RETURN, _MISSING, 0, 0)] if machine == "x86_64" else []),
        *_search(_segments(_decisions(machine, variant))),
    ]
    return b"".join(struct.pack("HBBI", kind, yes, no, value) for kind, value, yes, no in lines)


def _decisions(machine: str, variant: str) -> dict[int, tuple[Line, ...]]:
    allow, refuse = _return(_ALLOW), _return(_REFUSED)
    checks = {
        "clone": ((_LOAD, _ARGUMENTS_AT, 0, 0), (_ANY_BIT, _NAMESPACES, 0, 1), *refuse, *allow),
        "personality": (_argument(0), *_one_of(_PERSONALITIES, allow), *refuse),
        # no tracing of the sandbox's first process, which has more rights
        "ptrace": (_argument(1), (_EQUAL, 1, 1, 0), *allow, _argument(0), *_one_of((_TRACE_ME,), allow), *refuse),
        # no limit on its CPU time either, which would kill it
        "prlimit64": (_argument(0), (_EQUAL, 1, 1, 0), *allow, *refuse),
        "socket": _socket(),
        "socketpair": _socket(),
    }
    allowed = (
        *(system_calls.FILES, system_calls.MEMORY, system_calls.WAITING, system_calls.PROCESSES, system_calls.SOCKETS),
        *(system_calls.STATUS, system_calls.IDS, system_calls.OWNERS, system_calls.USERS),
    )
    decisions = {number: allow for group in allowed for number in system_calls.numbers(group, machine).values()}
    decisions |= dict.fromkeys(system_calls.numbers(system_calls.RIGHTS, machine).values(), refuse)
    checked = system_calls.numbers(system_calls.CHECKED, machine)
    decisions |= {number: checks[name] for name, number in checked.items()}
    if variant == ANSWERS:
        reads = system_calls.numbers("pidfd_getfd 438 438, process_vm_readv 310 270", machine)
        return decisions | dict.fromkeys(reads.values(), allow)
    return decisions | _with_users(machine, variant) if variant else decisions


def _with_users(machine: str, users: str) -> dict[int, tuple[Line, ...]]:
    allow, refuse, ask, succeed = map(_return, (_ALLOW, _REFUSED, _ASK, _DONE))
    # the third argument is not NULL: a new limit is set
    is_set = (
        line for half in (0, 4) for line in ((_LOAD, _ARGUMENTS_AT + 16 + half, 0, 0), (_EQUAL, 0, 1, 0), *succeed)
    )
    checks = {
        "open": (_argument(1), (_ANY_BIT, _CREATE, 0, 1), *ask, *allow),
        "openat": (_argument(2), (_ANY_BIT, _CREATE, 0, 1), *ask, *allow),
        "prctl": (_argument(0), *_one_of((_SET_KEEPING, _SET_SECURE_BITS), ask), *allow),
        "getsockopt": (
            _argument(1),
            *_one_of((_SOL_SOCKET,), (_argument(2), *_one_of((_SO_PEERCRED,), ask), *allow)),
            *allow,
        ),
        # RLIMIT_LOCKS stores a process's users: see `owners/credentials.py`
        "setrlimit": (_argument(0), *_one_of((_RLIMIT_LOCKS,), succeed), *allow),
        "prlimit64": (
            _argument(0),
            *_one_of((1,), refuse),
            _argument(1),
            *_one_of((_RLIMIT_LOCKS,), (*is_set, *allow)),
            *allow,
        ),
    }
    answered = system_calls.numbers(ANSWERED, machine)
    kept = system_calls.numbers(system_calls.STATUS, machine) if users == KEPT else {}
    limited = system_calls.numbers("setrlimit 160 164, prlimit64 302 261", machine)
    return {number: checks.get(name, ask) for name, number in (answered | limited).items() if name not in kept}


def _socket() -> tuple[Line, ...]:
    allow, no_protocol = _return(_ALLOW), _return(_ERRNO | errno.EPROTONOSUPPORT)
    inet = (_argument(2), *_one_of(_INET_PROTOCOLS, allow), *no_protocol)
    return (
        _argument(0),
        *_one_of((_UNIX,), allow),
        *_one_of((_INET,), inet),
        *_one_of((_INET6,), inet),
        *_one_of((_NETLINK,), (_argument(2), *_one_of((_NETLINK_ROUTE,), allow), *no_protocol)),
        *_return(_ERRNO | errno.EAFNOSUPPORT),
    )


def _return(value: int) -> tuple[Line, ...]:
    return ((_RETURN, value, 0, 0),)


def _argument(number: int) -> Line:
    """Load the lower half of an argument; the kernel ignores the upper half of an `int`."""
    return (_LOAD, _ARGUMENTS_AT + 8 * number, 0, 0)


def _one_of(values: Sequence[int], lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return lines that run `lines`, which must end by a return, if the loaded value is one of `values`."""
    return tuple(line for value in values for line in ((_EQUAL, value, 0, len(lines)), *lines))


def _segments(decisions: Mapping[int, tuple[Line, ...]]) -> list[tuple[int, tuple[Line, ...]]]:
    """Return the start of each range of numbers with equal lines; the last range has no end."""
    missing = _return(_MISSING)
    segments = [(0, decisions.get(0, missing))]
    for number in range(1, max(decisions) + 2):
        lines = decisions.get(number, missing)
        if lines != segments[-1][1]:
            segments.append((number, lines))
    return segments


def _search(segments: Sequence[tuple[int, tuple[Line, ...]]]) -> tuple[Line, ...]:
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    lower, upper = _search(segments[:middle]), _search(segments[middle:])
    # conditional jumps are limited to 255 lines
    return ((_AT_LEAST, segments[middle][0], 0, 1), (_JUMP, len(lower), 0, 0), *lower, *upper)

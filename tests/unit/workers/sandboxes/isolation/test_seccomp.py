"""The seccomp filter, run by a small BPF interpreter: its result for each system call, on both machine types."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

import pytest

from workers.sandboxes.isolation import seccomp, system_calls

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
ALLOWED, ERRNO, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
FREE = ("FILES", "STATUS", "MEMORY", "WAITING", "PROCESSES", "IDS", "SOCKETS")
_LOAD, _JUMP, _RETURN = 0x20, 0x05, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45


def answer(
    machine: str, number: int, arguments: Sequence[int] = (), arch: int = 0, variant: str = ""
) -> tuple[int, int]:
    """Return the filter's result and the number of its steps."""
    code = seccomp.assembled(machine, variant)
    lines = list(struct.iter_unpack("HBBI", code))
    words = [word % (1 << 64) for word in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("IIQ6Q", number, arch or ARCHES[machine], 0, *words)
    at = loaded = steps = 0
    while True:
        kind, yes, no, value = lines[at]
        at, steps = at + 1, steps + 1
        if kind == _LOAD:
            (loaded,) = struct.unpack_from("I", data, value)
        elif kind == _JUMP:
            at += value
        elif kind == _RETURN:
            return value, steps
        else:
            result = {_EQUAL: loaded == value, _AT_LEAST: loaded >= value, _ANY_BIT: bool(loaded & value)}[kind]
            at += yes if result else no


def named(machine: str, *groups: str) -> dict[str, int]:
    return {
        name: number
        for group in groups
        for name, number in system_calls.numbers(getattr(system_calls, group), machine).items()
    }


@pytest.mark.parametrize("machine", ARCHES)
def test_each_listed_call_has_its_result_and_all_others_are_missing(machine: str) -> None:
    answers = {number: answer(machine, number)[0] for number in range(1200)}
    free, rights = named(machine, *FREE, "OWNERS", "USERS"), named(machine, "RIGHTS")
    checked = named(machine, "CHECKED")
    assert {answers[number] for number in free.values()} == {ALLOWED}
    assert {answers[number] for number in rights.values()} == {ERRNO | errno.EPERM}
    others = answers.keys() - {*free.values(), *rights.values(), *checked.values()}
    assert {answers[number] for number in others} == {ERRNO | errno.ENOSYS}
    assert len(free) + len(rights) + len(checked) == len({*free.values(), *rights.values(), *checked.values()})


@pytest.mark.parametrize("machine", ARCHES)
def test_call_is_found_by_binary_search(machine: str) -> None:
    assert max(answer(machine, number)[1] for number in range(1200)) <= 24


@pytest.mark.parametrize(("machine", "other"), [("x86_64", I386), ("aarch64", ARM), ("x86_64", ARCHES["aarch64"])])
def test_programs_of_another_architecture_have_no_calls(machine: str, other: int) -> None:
    assert {answer(machine, number, arch=other)[0] for number in range(500)} == {ERRNO | errno.ENOSYS}


def test_x32_calls_are_closed() -> None:
    assert {answer("x86_64", 0x40000000 | number)[0] for number in range(600)} == {ERRNO | errno.ENOSYS}


@pytest.mark.parametrize("machine", ARCHES)
def test_only_calls_about_users_are_intercepted_with_several_users(machine: str) -> None:
    status = named(machine, "STATUS").values()
    always = {*named(machine, "IDS", "USERS", "OWNERS").values()}
    always |= {
        number
        for name, number in named(machine, "FILES", "PROCESSES").items()
        if name in ("creat", "mkdir", "mkdirat", "openat2", "execve", "execveat", "kill")
    }
    for number in range(600):
        plain = answer(machine, number)[0]
        kept, shown = (answer(machine, number, variant=each)[0] for each in ("kept", "shown"))
        assert kept == (NOTIFY if number in always else plain)
        assert shown == (NOTIFY if number in {*always, *status} else plain)
        opened = ALLOWED if number in (438, {"x86_64": 310, "aarch64": 270}[machine]) else plain
        assert answer(machine, number, variant="answers")[0] == opened


@pytest.mark.parametrize("machine", ARCHES)
@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("openat", (0, 0, 0o102), NOTIFY),
        ("openat", (0, 0o100, 2), ALLOWED),
        ("open", (0, 0o1100), NOTIFY),
        ("open", (0, 0o1001), ALLOWED),
        ("prctl", (8, 1), NOTIFY),
        ("prctl", (28, 16), NOTIFY),
        ("prctl", (7, 0), ALLOWED),
        ("getsockopt", (3, 1, 17), NOTIFY),
        ("getsockopt", (3, 1, 4), ALLOWED),
        ("getsockopt", (3, 6, 17), ALLOWED),
        ("setrlimit", (10, 1), ERRNO),
        ("setrlimit", (7, 1), ALLOWED),
        ("prlimit64", (0, 10, 0), ALLOWED),
        ("prlimit64", (0, 10, 5), ERRNO),
        ("prlimit64", (0, 10, 5 << 32), ERRNO),
        ("prlimit64", (0, 7, 5), ALLOWED),
        ("prlimit64", (1, 10, 0), ERRNO | errno.EPERM),
        ("prlimit64", (1, 7, 5), ERRNO | errno.EPERM),
    ],
)
def test_arguments_are_checked_with_several_users(
    machine: str, name: str, arguments: tuple[int, ...], action: int
) -> None:
    number = named(machine, "FILES", "PROCESSES", "SOCKETS", "CHECKED").get(name)
    if number is None:
        assert (machine, name) == ("aarch64", "open")
        return
    assert {answer(machine, number, arguments, variant=each)[0] for each in ("kept", "shown")} == {action}


@pytest.mark.parametrize("machine", ARCHES)
@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("socket", (1, 1, 0), 0),
        ("socket", (2, 0x80001, 6), 0),
        ("socket", (10, 2, 0), 0),
        ("socket", (10, 3, 58), 0),
        ("socket", (16, 3, 0), 0),
        ("socket", ((7 << 32) | 40, 1, 0), errno.EAFNOSUPPORT),
        *(("socket", (family, 1, 0), errno.EAFNOSUPPORT) for family in (0, 3, 15, 17, 21, 29, 30, 31, 38, 40, 43, 44)),
        ("socketpair", (30, 1, 0), errno.EAFNOSUPPORT),
        *(("socket", (2, 1, protocol), errno.EPROTONOSUPPORT) for protocol in (33, 115, 132, 136, 255, 262)),
        *(("socket", (16, 3, protocol), errno.EPROTONOSUPPORT) for protocol in (4, 5, 9, 12, 15, 16)),
        ("clone", (0x1200011, 0), 0),
        ("clone", (0x3D0F00, 0), 0),
        *(("clone", (1 << bit | 17, 0), errno.EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
        ("personality", (0xFFFFFFFF,), 0),
        ("personality", (0x40000,), 0),
        ("personality", (0x400000,), errno.EPERM),
        ("prlimit64", (0, 0), 0),
        ("prlimit64", (2, 0), 0),
        ("prlimit64", (1, 0), errno.EPERM),
        ("prlimit64", ((1 << 32) | 1, 0), errno.EPERM),
        ("ptrace", (0, 1), 0),
        ("ptrace", (16, 2), 0),
        ("ptrace", (16, 1), errno.EPERM),
        ("ptrace", (0x4206, (1 << 32) | 1), errno.EPERM),
    ],
)
def test_arguments_are_checked(machine: str, name: str, arguments: tuple[int, ...], error: int) -> None:
    action, _ = answer(machine, named(machine, "CHECKED")[name], arguments)
    assert action == (ERRNO | error if error else ALLOWED)

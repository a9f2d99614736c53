"""Detect foreground programs of a terminal that wait for input, by the system call that blocks them.

Thus a driver need not guess from silence whether a program computes or waits. If the kernel does not show the call
(other machine type, hardened kernel), silence is the only sign.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from workers.sandboxes.processes.process_tree import children

_MOST = 64
# read, readv; then poll, select, pselect6, ppoll, epoll_wait, epoll_pwait, epoll_pwait2
_READS = {"x86_64": {0, 19}, "aarch64": {63, 65}}.get(platform.machine(), set())
_POLLS = {"x86_64": {7, 23, 270, 271, 232, 281, 441}, "aarch64": {72, 73, 22, 441}}.get(platform.machine(), set())
_OWN_TERMINAL = "/tty"


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
    result = [pid]
    for each in result:
        yield each
        result += children(each)[: _MOST - len(result)]


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

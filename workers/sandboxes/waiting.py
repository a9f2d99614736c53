"""Whether the programs in a terminal's foreground wait for their user: the kernel tells what each is blocked in.

So a driver need not guess from silence alone whether a program computes or asks. Where the kernel does not tell, as on
another machine type or a hardened one, nothing is known and silence is all there is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from workers.sandboxes.marked import children

_MOST = 64
# read, readv; then poll, select, pselect6, ppoll, epoll_wait, epoll_pwait, epoll_pwait2
_READS = {"x86_64": {0, 19}, "aarch64": {63, 65}}.get(platform.machine(), set())
_POLLS = {"x86_64": {7, 23, 270, 271, 232, 281, 441}, "aarch64": {72, 73, 22, 441}}.get(platform.machine(), set())
_OWN_TERMINAL = "/tty"


class Doing(IntEnum):
    """What a program does; of several, that of the group is the highest."""

    UNKNOWN = 0
    BUSY = 1
    WAITING = 2
    """For something to happen, which may be a key."""
    READING = 3
    """The terminal: it is the user's turn."""


def doing(shell: int, group: int, terminal: str) -> Doing:
    """What the processes of a group among a shell and its descendants do; `terminal` is its name on the host."""
    return max((_of_process(pid, terminal) for pid in members(shell, group)), default=Doing.BUSY)


def members(shell: int, group: int) -> list[int]:
    """The processes of a group among a shell and its descendants."""
    return [pid for pid in _family(shell) if _group_of(pid) == group]


def _family(pid: int) -> Iterator[int]:
    found = [pid]
    for each in found:
        yield each
        found += children(each)[: _MOST - len(found)]


def _group_of(pid: int) -> int:
    try:
        # `stat` has it too, but may wait for a process that sleeps in the kernel
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("NSpgid:")).split()[1])
    except (OSError, StopIteration):
        return 0


def _of_process(pid: int, terminal: str) -> Doing:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())[:_MOST]
    except OSError:
        return Doing.BUSY
    return max((_of_task(task, terminal) for task in tasks), default=Doing.BUSY)


def _of_task(task: Path, terminal: str) -> Doing:
    try:
        # its number and arguments; or `running`
        number, *arguments = (task / "syscall").read_text().split()
    except PermissionError:
        return Doing.UNKNOWN if _has_memory(task) else Doing.BUSY
    except (OSError, ValueError):
        # it ends in this moment
        return Doing.BUSY
    if not _READS:
        return Doing.UNKNOWN
    if not number.isdecimal():
        return Doing.BUSY
    if int(number) in _READS and _is_terminal(task / "fd" / str(int(arguments[0], 16)), terminal):
        return Doing.READING
    return Doing.WAITING if int(number) in _POLLS else Doing.BUSY


def _has_memory(task: Path) -> bool:
    """Whether it is not about to end: without memory, newer kernels tell nobody but root what it does."""
    try:
        return "\nVmSize:" in (task / "status").read_text(errors="replace")
    except OSError:
        return False


def _is_terminal(descriptor: Path, terminal: str) -> bool:
    try:
        # by name: to ask for more might wait for a file system that the program itself serves
        name = str(descriptor.readlink())
    except OSError:
        return False
    return name == terminal or name.endswith(_OWN_TERMINAL)

"""CPU time of a process tree and memory of a process, read from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int(_fields(int(folder.name))[1])
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    result, todo = [], [root]
    while todo:
        result.append(todo.pop())
        todo += children.get(result[-1], [])
    return result


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds so far of these processes and their ended children."""
    total = 0
    for pid in pids:
        try:
            total += sum(int(value) for value in _fields(pid)[11:15])
        except OSError:
            continue
    return total / _TICKS


def memory_mb(pid: int) -> float:
    """Return the proportional set size of one process, MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"process {pid} has no memory")


def forget_peak(pid: int) -> None:
    """Reset `peak_mb` to the present memory of the process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mb(pid: int) -> float:
    """Return the maximum memory of a process since `forget_peak`, MB, resident, shared pages included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"process {pid} has no memory")


def memory_of_all_mb(pids: list[int]) -> float:
    """Return the memory of several processes, shared memory counted once; ended ones count 0."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += memory_mb(pid)
    return total


def named(pids: list[int], words: str) -> int:
    """Return the one of these processes whose command line contains `words`."""
    for pid in pids:
        if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
            return pid
    raise LookupError(f"no process runs {words!r}")


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

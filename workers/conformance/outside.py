"""Views of a sandbox from outside, as any process of the node has them: processes, mounts, sockets and files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from farm.settings import settings

_DEPTH = 3
"""Depth below the scratch folder to which a sandbox's own folder is searched for."""


def processes_with(text: str) -> list[int]:
    """The pids of living processes in whose command line or environment a text occurs, other than this one."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _occurs(text.encode(), entry):
            result.append(int(entry.name))
    return result


def _occurs(text: bytes, process: Path) -> bool:
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            if text in (process / name).read_bytes():
                return True
    return False


def mounts_with(text: str) -> list[str]:
    """Mounts of this process's namespace in which a text occurs."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]


def sockets_with(text: str) -> list[str]:
    """Unix sockets of this process's namespace in whose path a text occurs."""
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if text in line]


def files_with(text: str) -> list[Path]:
    """Files and folders in whose name a text occurs, in the scratch folder and a little below it."""
    return [path for path in _below(settings().scratch, _DEPTH) if text in path.name]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            yield path
            if depth > 1 and path.is_dir() and not path.is_symlink():
                yield from _below(path, depth - 1)


def left_of(*texts: str) -> list[str]:
    """In words, all that is left of a sandbox: give its id and what marks the processes in it."""
    left = []
    for text in texts:
        left += [f"process {pid}: {_command(pid)}" for pid in processes_with(text)]
        left += [f"mount {line}" for line in mounts_with(text)]
        left += [f"socket {line}" for line in sockets_with(text)]
        left += [f"file {path}" for path in files_with(text)]
    return left


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "just ended"


def namespaces_of(pid: int | str) -> dict[str, str]:
    """Name to identity of the namespaces of a process of this node, as far as they may be seen."""
    result = {}
    for entry in Path(f"/proc/{pid}/ns").iterdir():
        with contextlib.suppress(OSError):
            result[entry.name] = str(entry.readlink())
    return result


def zombies() -> int:
    """Return the number of children of this process that have ended and were not waited for."""
    return sum(_is_own_zombie(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _is_own_zombie(process: Path) -> bool:
    try:
        state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state == "Z" and int(parent) == os.getpid()


def descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def own_start() -> bytes:
    """Return the start time of this process, in the kernel's ticks: with its pid, a name that is never reused."""
    return Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]

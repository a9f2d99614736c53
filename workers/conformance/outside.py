"""Views of a sandbox from outside, as available to any process of the node: processes, mounts, sockets and files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from workers.config import own_config

_DEPTH = 3
"""Depth below the scratch folder of the search for a sandbox's own folder."""


def processes_with(text: str) -> list[int]:
    """Return the pids of other living processes whose command line or environment contains a text."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _occurs(text.encode(), entry):
            pids.append(int(entry.name))
    return pids


def _occurs(text: bytes, process: Path) -> bool:
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            if text in (process / name).read_bytes():
                return True
    return False


def mounts_with(text: str) -> list[str]:
    """Return the mounts of this process's namespace that contain a text."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if text in line]


def files_with(text: str) -> list[Path]:
    """Return files and folders whose name contains a text, in the scratch folder and a few levels below it."""
    return [path for path in _below(own_config().sandboxes.scratch, _DEPTH) if text in path.name]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            yield path
            if depth > 1 and path.is_dir() and not path.is_symlink():
                yield from _below(path, depth - 1)


def left_of(*texts: str) -> list[str]:
    """Return descriptions of everything that is left of a sandbox, given its id and its processes' marks."""
    left = []
    for text in texts:
        left += [f"process {pid}: {_command(pid)}" for pid in processes_with(text)]
        left += [f"mount {line}" for line in mounts_with(text)]
        left += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if text in line]
        left += [f"file {path}" for path in files_with(text)]
    return left


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    return "just ended"


def namespaces_of(pid: int | str) -> dict[str, str]:
    """Return the namespaces of a process of this node by name, as far as they can be read."""
    namespaces = {}
    for entry in Path(f"/proc/{pid}/ns").iterdir():
        with contextlib.suppress(OSError):
            namespaces[entry.name] = str(entry.readlink())
    return namespaces


def zombies() -> int:
    """Return the number of zombie children of this process."""
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
    """Return the start time of this process in the kernel's ticks; together with its pid, it is never reused."""
    return Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]

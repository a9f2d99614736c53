"""The command line that `ps` shows of a forked process, which would be that of the process it was forked from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

_ARG_START = 48
"""The field of `/proc/self/stat` with the address of the command line; the next one has its end (man proc_pid_stat)."""
TITLE_ROOM = 256
"""Bytes that a command line needs beyond its own, for those that replace it."""


def show_as(argv: Sequence[str]) -> None:
    """Overwrite this process's command line, as far as there is room in it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # the first of them is the third
    start, end = (int(field) for field in fields[_ARG_START - 3 :][:2])
    text = b"\0".join(map(str.encode, argv))[: max(0, end - start - 1)]
    if text:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)

"""Search of the log files of a farm's processes for lines about a batch, a group or a rollout.

Logs of several nodes in a shared folder are merged by time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_TEXT_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_SUFFIXES = (".log", ".out", ".err")


@dataclass(frozen=True, slots=True)
class LoggedLine:
    """An event of a log, with its traceback. `at` is in seconds since 1970, `path` is the file."""

    at: float
    path: Path
    text: str


def lines_about(ref: str, folders: Sequence[Path]) -> list[LoggedLine]:
    """Return the log lines about an id, by time. Unreadable files are skipped."""
    wanted = re.compile(rb"(?<![\w.-])" + re.escape(ref.encode()) + rb"(?!\w)")
    files = sorted({path for folder in folders for path in folder.rglob("*") if path.suffix in _SUFFIXES})
    found = [line for path in files for line in _lines_of(path, ref.encode(), wanted)]
    return sorted(found, key=lambda line: line.at)


def _lines_of(path: Path, ref: bytes, wanted: re.Pattern[bytes]) -> Iterator[LoggedLine]:
    at, event = 0.0, b""
    try:
        with path.open("rb") as lines:
            for line in lines:
                began = _time(line)
                if began is None:
                    # a continuation line of the previous event
                    event += line if event else b""
                    continue
                if event:
                    yield LoggedLine(at, path, event.decode("utf-8", "replace").rstrip("\n"))
                at, event = began, line if ref in line and wanted.search(line) else b""
    except OSError:
        pass
    if event:
        yield LoggedLine(at, path, event.decode("utf-8", "replace").rstrip("\n"))


def _time(line: bytes) -> float | None:
    """Return the time of a line that begins an event; None if it does not."""
    try:
        if line.startswith(b"{"):
            return datetime.fromisoformat(json.loads(line)["at"]).timestamp()
        if _TEXT_TIME.match(line):
            return datetime.strptime(line[:23].decode(), "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    except (ValueError, KeyError, TypeError):
        pass
    return None

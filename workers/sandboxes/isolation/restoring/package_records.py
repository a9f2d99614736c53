# ruff: noqa: PTH123
"""Files that package managers recorded in a layer. Standard library only.

A policy can forge a record. So a record only lets new files stay, and none that run by themselves.
"""

from __future__ import annotations

import contextlib
import csv
import os
import posixpath

from workers.sandboxes.isolation.restoring import rpm_database

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAX_BYTES = 20_000_000
_OF_DPKG = "var/lib/dpkg/info/"
_OF_APK = "lib/apk/db/installed"
_OF_RPM = ("usr/lib/sysimage/rpm/rpmdb.sqlite", "var/lib/rpm/rpmdb.sqlite")


def recorded(paths: Iterable[str]) -> frozenset[str]:
    """Return the files named by the package records among these paths, relative to the working directory."""
    return frozenset(name for path in paths for name in _named(path))


def _named(path: str) -> Iterator[str]:
    if path.startswith(_OF_DPKG) and path.endswith(".list"):
        yield from (line.strip("/") for line in text_of(path).splitlines())
    elif path == _OF_APK or path == f"usr/{_OF_APK}":
        folder = ""
        for line in text_of(path).splitlines():
            if line.startswith("F:"):
                folder = line[2:]
            elif line.startswith("R:"):
                yield posixpath.join(folder, line[2:])
    elif path in _OF_RPM:
        yield from rpm_database.files_of(_data_of(path, rpm_database.MAX_BYTES))
    elif path.endswith(".dist-info/RECORD"):
        site = posixpath.dirname(posixpath.dirname(path))
        with contextlib.suppress(csv.Error):
            for row in csv.reader(text_of(path).splitlines()):
                if row:
                    yield posixpath.normpath(posixpath.join("/", site, row[0])).strip("/")


def text_of(path: str, max_bytes: int = _MAX_BYTES) -> str:
    """Return the text of a file that the policy can have written; empty if it is unreadable or too large."""
    return _data_of(path, max_bytes).decode("utf-8", "surrogateescape")


def _data_of(path: str, max_bytes: int) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        return b""
    return data if len(data) <= max_bytes else b""

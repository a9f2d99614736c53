"""The share of a sandbox in a disk that is full."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from workers.sandboxes.disk_use import DiskUse

_NOBODY = 65534
Room = namedtuple("Room", "f_bavail f_frsize f_favail f_files")
MB = 1 << 20


def room(monkeypatch: pytest.MonkeyPatch, n_bytes: int, n_files: int, *, counts_files: bool = True) -> None:
    found = Room(n_bytes // 512, 512, n_files, n_files if counts_files else 0)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def write(folder: Path, n_mb: int) -> None:
    for number in range(n_mb):
        (folder / f"upper/{number}").write_bytes(bytes(MB))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A sandbox's folder, where every user can enter."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "upper").mkdir()
        yield Path(name)


@pytest.mark.parametrize(
    ("before", "after", "left", "files", "counted", "filled_the_disk"),
    [
        (0, 6, 10 * MB, 10_000, True, True),
        (0, 4, 10 * MB, 10_000, True, False),
        (0, 4, 10 * MB, 6, True, True),
        (0, 4, 10 * MB, 6, False, False),
        (0, 0, 10 * MB, 10_000, True, False),
        # what was there before it played is no growth
        (8, 12, 10 * MB, 10_000, True, False),
        (8, 13, 10 * MB, 10_000, True, True),
        # the disk was full before
        (0, 3, 0, 10_000, True, False),
    ],
)
def test_growth_is_compared_with_the_room(
    before: int,
    after: int,
    left: int,
    files: int,
    counted: bool,
    filled_the_disk: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(folder, before)
    room(monkeypatch, left, files, counts_files=counted)
    use = DiskUse(folder, os.getpid())
    assert not use.filled_the_disk()
    write(folder, after)
    use.look()
    assert use.filled_the_disk() is filled_the_disk
    use.close()


def test_what_was_removed_again_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 10 * MB, 10_000)
    use = DiskUse(folder, os.getpid())
    write(folder, 6)
    use.look()
    for path in (folder / "upper").iterdir():
        path.unlink()
    assert use.filled_the_disk()
    use.close()


def test_a_closed_folder_hides_nothing(folder: Path) -> None:
    closed = folder / "upper/closed"
    closed.mkdir(mode=0o700)
    (closed / "inside").mkdir()
    closed.chmod(0)

    def found() -> bool:
        use = DiskUse(folder, os.getpid())
        use.look()
        return use.filled_the_disk()

    assert as_ordinary_user(found)
    closed.chmod(0o755)
    assert not as_ordinary_user(found)


def as_ordinary_user(check: Callable[[], bool]) -> bool:
    if os.geteuid():
        return check()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setuid(_NOBODY)
            code = 0 if check() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0

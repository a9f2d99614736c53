"""The share of a sandbox in filling a disk."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from workers.sandboxes.shortage import DiskUse

_NOBODY = 65534
Room = namedtuple("Room", "f_bavail f_frsize f_favail f_files")
MB = 1 << 20


def room(monkeypatch: pytest.MonkeyPatch, n_bytes: int, n_files: int, *, counts_files: bool = True) -> None:
    room = Room(n_bytes // 512, 512, n_files, n_files if counts_files else 0)
    monkeypatch.setattr(os, "statvfs", lambda _: room)


def write(folder: Path, n_mb: int) -> None:
    for number in range(n_mb):
        (folder / f"upper/{number}").write_bytes(bytes(MB))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a sandbox's folder, which every user can enter."""
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
        # files that existed before it ran are no growth
        (8, 12, 10 * MB, 10_000, True, False),
        (8, 13, 10 * MB, 10_000, True, True),
        # the disk was full before
        (0, 3, 0, 10_000, True, False),
    ],
)
def test_growth_is_compared_with_the_free_space(
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
    assert not use.filled_the_disk
    write(folder, after)
    use.look(full=True)
    assert use.filled_the_disk is filled_the_disk
    use.close()


def test_files_that_were_removed_again_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 10 * MB, 10_000)
    use = DiskUse(folder, os.getpid())
    write(folder, 6)
    use.look(full=True)
    for path in (folder / "upper").iterdir():
        path.unlink()
    assert use.filled_the_disk
    use.close()


@pytest.mark.parametrize(
    ("looks", "filled_the_disk"),
    [
        # the seconds, whether the disk is full, MB of the sandbox, MB left
        ([(0.0, False, 6, 4), (0.5, True, 0, 0)], True),
        ([(0.0, False, 6, 4), (5.0, True, 0, 0)], False),
        ([(0.0, True, 0, 0), (0.5, False, 6, 4)], True),
        ([(0.0, True, 0, 0), (5.0, False, 6, 4)], False),
        # more than half of the space is left
        ([(0.0, False, 6, 8), (0.5, True, 0, 0)], False),
        ([(0.0, False, 4, 4), (0.5, True, 4, 0)], False),
        ([(0.0, False, 6, 4), (0.5, False, 0, 4)], False),
    ],
)
def test_files_shortly_before_or_after_the_disk_was_full_count(
    looks: list[tuple[float, bool, int, int]], filled_the_disk: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, 10 * MB, 10_000)
    use = DiskUse(folder, os.getpid())
    for at, full, n_mb, left_mb in looks:
        write(folder, n_mb)
        room(monkeypatch, left_mb * MB, 10_000)
        monkeypatch.setattr(time, "monotonic", lambda at=at: 1000.0 + at)
        use.look(full=full)
        for path in (folder / "upper").iterdir():
            path.unlink()
    assert use.filled_the_disk is filled_the_disk
    use.close()


def test_closed_folder_hides_nothing(folder: Path) -> None:
    closed = folder / "upper/closed"
    closed.mkdir(mode=0o700)
    (closed / "inside").mkdir()
    closed.chmod(0)

    def filled() -> bool:
        use = DiskUse(folder, os.getpid())
        use.look(full=True)
        return use.filled_the_disk

    assert as_ordinary_user(filled)
    closed.chmod(0o755)
    assert not as_ordinary_user(filled)


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

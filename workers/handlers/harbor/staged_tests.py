"""Folders of the node to copy into a sandbox before a verification: empty ones for logs, and the tests."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from farm.tasks.ignored_files import IgnoredFiles
from workers.handlers.harbor.reward_files import JSON, TEXT

_LOGS = ("agent", "verifier", "artifacts")
_MAX_READ = 1_000_000


@dataclass(frozen=True, slots=True)
class StagedTests:
    """Copies on the node. `names_only_text`: the tests name reward.txt, and reward.json nowhere."""

    logs: Path
    tests: Path
    names_only_text: bool


@asynccontextmanager
async def staged(folders: Sequence[Path], ignored: IgnoredFiles | None = None) -> AsyncIterator[StagedTests]:
    """Yield the folders of logs and the merged tests, with executable scripts; removed at the end."""
    with TemporaryDirectory(prefix="farm-tests-") as place:
        yield await asyncio.to_thread(_stage, Path(place), folders, ignored)


def _stage(place: Path, folders: Sequence[Path], ignored: IgnoredFiles | None) -> StagedTests:
    tests = place / "tests"
    tests.mkdir()
    for folder in folders:
        shutil.copytree(folder, tests, symlinks=True, dirs_exist_ok=True, ignore=ignored.among if ignored else None)
    texts = [_text(path) for path in tests.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in (tests, *tests.rglob("*")):
        if not path.is_symlink():
            # Every user of the sandbox may read them, whatever their original modes were.
            path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else path.stat().st_mode & 0o111 | 0o644)
    named = [any(name.encode() in text for text in texts) for name in (TEXT, JSON)]
    return StagedTests(empty_logs(place), tests, names_only_text=named == [True, False])


def empty_logs(place: Path) -> Path:
    """Create the folders of logs, writable for every user of the sandbox, below `place`."""
    logs = place / "logs"
    for folder in (logs, *(logs / name for name in _LOGS)):
        folder.mkdir()
        # mkdir applies the umask.
        os.chmod(folder, 0o777)  # noqa: PTH101, S103
    return logs


def _text(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_READ)

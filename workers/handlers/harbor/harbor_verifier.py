"""One verification: tests are copied into a sandbox without other processes, run there, and their reward files read.

The exit code of test.sh is ignored. Its variables are chosen here, its interpreter reads no start-up files, folders of
tests and logs are the task's own, and leftover processes have ended before rewards are read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from farm.errors import EvaluatorError, ToolError
from farm.tasks.ignored_files import IgnoredFiles
from workers.handlers.harbor.reward_files import FOLDER, JSON, TEXT, rewards_of
from workers.plugins.interfaces import ExecResult, Sandbox

_LOGS = ("agent", "verifier", "artifacts")
_MAX_READ = 1_000_000
TESTS = "/tests"
_SHOWN = 2000
_KILL = "trap '' TERM HUP; kill -9 -1"
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class StagedTests:
    """Copies on the node. `names_only_text`: the tests name reward.txt, and reward.json nowhere."""

    logs: Path
    tests: Path
    names_only_text: bool


@asynccontextmanager
async def staged(folders: Sequence[Path], ignored: IgnoredFiles | None = None) -> AsyncIterator[StagedTests]:
    """Yield the folders of logs and the merged tests, with executable scripts; removed at the end."""
    with TemporaryDirectory(prefix="farm-tests-") as root:
        yield await asyncio.to_thread(_stage, Path(root), folders, ignored)


def _stage(root: Path, folders: Sequence[Path], ignored: IgnoredFiles | None) -> StagedTests:
    tests = root / "tests"
    tests.mkdir()
    for folder in folders:
        shutil.copytree(folder, tests, symlinks=True, dirs_exist_ok=True, ignore=ignored.among if ignored else None)
    texts = [_text(path) for path in tests.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in (tests, *tests.rglob("*")):
        if not path.is_symlink():
            # Every user of the sandbox may read them, whatever their original modes were.
            path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else path.stat().st_mode & 0o111 | 0o644)
    named = [any(name.encode() in text for text in texts) for name in (TEXT, JSON)]
    return StagedTests(empty_logs(root), tests, names_only_text=named == [True, False])


def empty_logs(root: Path) -> Path:
    """Create the folders of logs, writable for every user of the sandbox, below `root`."""
    logs = root / "logs"
    for folder in (logs, *(logs / name for name in _LOGS)):
        folder.mkdir()
        # mkdir applies the umask.
        os.chmod(folder, 0o777)  # noqa: PTH101, S103
    return logs


def _text(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_READ)


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a step: folders of the node that are merged in /tests; none if the image has them."""

    __test__ = False

    folders: Sequence[Path]
    env: Mapping[str, str]
    timeout_s: float
    ignored: IgnoredFiles | None = None
    """Files of the folders that are not copied."""


@dataclass(frozen=True, slots=True)
class VerifiedRewards:
    """The rewards of a verification by name, and their origin as JSON."""

    rewards: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


class Unrewarded(EvaluatorError):
    """Tests gave no reward: they timed out (`timed_out`), could not run, or left no readable reward."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


async def verify(sandbox: Sandbox, tests: Tests, what: str) -> VerifiedRewards:
    """Run the tests. Raises Unrewarded if they timed out or gave no reward, SandboxError if the sandbox is gone."""
    started = time.monotonic()
    async with staged(tests.folders, tests.ignored) as stage:
        try:
            await sandbox.upload(stage.logs, "/logs")
            if tests.folders:
                await sandbox.upload(stage.tests, TESTS)
        except ToolError as error:
            raise Unrewarded(f"{what}: its tests cannot be put into the sandbox: {error}") from error
        names_only_text = stage.names_only_text
    result = await sandbox.exec(
        ["/bin/bash", "--noprofile", "--norc", "-c", f"exec {TESTS}/test.sh"],
        timeout_s=tests.timeout_s,
        env=tests.env,
    )
    if result.timed_out:
        reason = f"{what}: its tests took longer than {tests.timeout_s:g} s: {_output_of(result)}"
        raise Unrewarded(reason, timed_out=True)
    # Leftover processes may wait for the end of the tests, to write after them.
    await sandbox.exec(["/bin/bash", "--noprofile", "--norc", "-c", _KILL], timeout_s=_KILL_S)
    contents = await _reward_files(sandbox, what)
    details: dict[str, Any] = {"exit_code": result.code, "limit": result.limit, "output": _output_of(result)}
    if names_only_text and JSON in contents:
        # No test of the task writes it.
        del contents[JSON]
        details["tampered"] = f"{FOLDER}/{JSON}, which no test of the task names, was there, and was not read"
    try:
        rewards = rewards_of(contents)
    except EvaluatorError as error:
        raise Unrewarded(
            f"{what}: {error}; its tests ended with code {result.code} and the output: {_output_of(result)}"
        ) from None
    return VerifiedRewards(rewards, {**details, "verifier_s": round(time.monotonic() - started, 3)})


async def _reward_files(sandbox: Sandbox, what: str) -> dict[str, bytes]:
    contents = {}
    for name in (JSON, TEXT):
        try:
            contents[name] = await sandbox.read_file(f"{FOLDER}/{name}")
        except ToolError as error:
            if "No such file" not in str(error):
                raise Unrewarded(f"{what}: {error}") from error
    return contents


def _output_of(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return text if len(text) <= _SHOWN else f"[...] {text[-_SHOWN:]}"

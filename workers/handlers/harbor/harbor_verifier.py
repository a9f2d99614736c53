"""One verification: tests are copied into a sandbox without other processes, run there, and their reward files read.

The exit code of test.sh is ignored. Its variables are chosen here, its interpreter reads no start-up files, folders of
tests and logs are the task's own, and leftover processes have ended before rewards are read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import EvaluatorError, ToolError
from farm.tasks.ignored_files import IgnoredFiles
from workers.handlers.harbor.reward_files import FOLDER, JSON, TEXT, rewards_of
from workers.handlers.harbor.staged_tests import staged
from workers.plugins.interfaces import ExecResult, Sandbox

TESTS = "/tests"
_SHOWN = 2000
_KILL = "trap '' TERM HUP; kill -9 -1"
_KILL_S = 10.0


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
            f"{what}: {error}; its tests ended with {result.code} and said: {_output_of(result)}"
        ) from None
    return VerifiedRewards(rewards, {**details, "verifier_s": round(time.monotonic() - started, 3)})


async def _reward_files(sandbox: Sandbox, what: str) -> dict[str, bytes]:
    contents = {}
    for name in (JSON, TEXT):
        try:
            contents[name] = await sandbox.read_file(f"{FOLDER}/{name}")
        except ToolError as error:
            if not _is_missing(error):
                raise Unrewarded(f"{what}: {error}") from error
    return contents


def _is_missing(error: ToolError) -> bool:
    return "No such file" in str(error)


def _output_of(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return text if len(text) <= _SHOWN else f"[...] {text[-_SHOWN:]}"

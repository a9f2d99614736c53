"""The solution of a Harbor task, run as Harbor's oracle runs it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from farm.errors import InvalidRequest, SandboxError
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_config import StepTable
from farm.tasks.harbor_instance import HarborInstance
from farm.tasks.ignored_files import IGNORE_FILE, IgnoredFiles
from workers.plugins.interfaces import ExecResult, Sandbox

_SOLVE = "solve.sh"
_FOLDER = "/solution"
_RUN = f"chmod +x {_FOLDER}/{_SOLVE}; exec {_FOLDER}/{_SOLVE}"
"""The first line of the script may name an interpreter."""


def has_solution(instance: HarborInstance, step: StepTable | None) -> bool:
    """True if the task, or this step of it, has a solution."""
    return bool(instance.script(step, "solution", _SOLVE))


def solution_s(instance: HarborInstance, step: StepTable | None) -> float:
    """Return the time limit of a solution in seconds: the agent's."""
    return (step.agent.timeout_sec if step else None) or instance.task.agent.timeout_sec or 3600.0


async def run_solution(
    sandbox: Sandbox, instance: HarborInstance, step: StepTable | None, archive: Path, secrets: Mapping[str, str]
) -> ExecResult:
    """Run `solution/solve.sh`, then remove its folder. Raises InvalidRequest if the task has none.

    Files excluded by its `.harborignore` files are not copied.
    """
    script = instance.script(step, "solution", _SOLVE)
    if not script:
        raise InvalidRequest(f"there is no solution/{_SOLVE}" + (f" for step {step.name}" if step else ""))
    ignored = IgnoredFiles(archive)
    if await asyncio.to_thread(ignored.has, archive / script):
        raise InvalidRequest(f"a {IGNORE_FILE} excludes it, so there is no solution to run", field=script)
    with TemporaryDirectory(prefix="farm-solution-") as root:
        kept = Path(root) / "solution"
        folder = (archive / script).parent
        await asyncio.to_thread(shutil.copytree, folder, kept, symlinks=True, ignore=ignored.among)
        await sandbox.upload(kept, _FOLDER)
    env = {"DEBIAN_FRONTEND": "noninteractive", **expanded(instance.task.solution.env, secrets, whole=True)}
    result = await sandbox.exec(["/bin/bash", "-c", _RUN], timeout_s=solution_s(instance, step), env=env)
    cleared = await sandbox.exec(["rm", "-rf", _FOLDER], timeout_s=60.0)
    if cleared.code != 0:
        raise SandboxError(f"sandbox {sandbox.sandbox_id}: {_FOLDER} cannot be removed: {cleared.stderr[-300:]!r}")
    return result

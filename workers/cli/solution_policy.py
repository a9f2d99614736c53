"""A policy that is none: it plays the solution that a Harbor task brings along, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from farm.errors import InvalidRequest, SandboxError
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_instance import HarborInstance
from workers.cli.acting_policy import ActingPolicy
from workers.interfaces import ExecResult, Sandbox
from workers.stage_job import SandboxSource

_SOLVE = "solve.sh"
_PLACE = "/solution"
_RUN = f"chmod +x {_PLACE}/{_SOLVE}; exec {_PLACE}/{_SOLVE}"
"""Its first line may name an interpreter."""


class SolutionPolicy(ActingPolicy):
    """Runs `solution/solve.sh` of each step in the sandbox that is played in."""

    def __init__(
        self,
        sandbox_id: str,
        source: SandboxSource | None,
        instance: HarborInstance,
        folder: Path,
        secrets: Mapping[str, str],
    ) -> None:
        super().__init__(sandbox_id, source)
        self.results: list[ExecResult] = []
        self._instance = instance
        self._folder = folder
        self._env = expanded(instance.task.solution.env, secrets, whole=True)

    async def act(self, sandbox: Sandbox | None, index: int) -> None:
        """Play the next step's solution. Raises InvalidRequest if the task has none."""
        steps = self._instance.steps
        step = steps[index] if steps else None
        script = self._instance.script(step, "solution", _SOLVE)
        if not script:
            raise InvalidRequest(f"there is no solution/{_SOLVE}" + (f" for step {step.name}" if step else ""))
        assert sandbox is not None
        await sandbox.upload((self._folder / script).parent, _PLACE)
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._env}
        limit_s = (step.agent.timeout_sec if step else None) or self._instance.task.agent.timeout_sec or 3600.0
        self.results.append(await sandbox.exec(["/bin/bash", "-c", _RUN], timeout_s=limit_s, env=env))
        cleared = await sandbox.exec(["rm", "-rf", _PLACE], timeout_s=60.0)
        if cleared.code != 0:
            raise SandboxError(f"sandbox {sandbox.sandbox_id}: {_PLACE} cannot be removed: {cleared.stderr[-300:]!r}")

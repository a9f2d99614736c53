"""A substitute for a policy: runs a Harbor task's solution step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from farm.tasks.harbor_instance import HarborInstance
from workers.cli.acting_policy import ActingPolicy
from workers.handlers.harbor.solutions import run_solution
from workers.plugins.interfaces import ExecResult, Sandbox
from workers.stages.stage_job import SandboxSource


class SolutionPolicy(ActingPolicy):
    """Runs `solution/solve.sh` of each step in the rollout's sandbox."""

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
        self._secrets = secrets

    async def act(self, sandbox: Sandbox | None, index: int) -> None:
        """Run the next step's solution. Raises InvalidRequest if the task has none."""
        steps = self._instance.steps
        step = steps[index] if steps else None
        assert sandbox is not None
        self.results.append(await run_solution(sandbox, self._instance, step, self._folder, self._secrets))

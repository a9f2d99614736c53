"""A policy that is none: it plays the solution that a Harbor task brings along, step by step, or does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.errors import InvalidRequest, SandboxError
from farm.records.request import SamplingParams, SandboxSpec
from farm.records.trajectory import Completion, Message
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_instance import HarborInstance
from workers.interfaces import ExecResult, OnDelta, SandboxProvider

_SOLVE = "solve.sh"
_PLACE = "/solution"


class SolutionPolicy:
    """Runs `solution/solve.sh` of each step in the sandbox that is played in; without `solves` it only answers."""

    def __init__(
        self,
        instance: HarborInstance,
        folder: Path,
        provider: SandboxProvider,
        sandbox_id: str,
        spec: SandboxSpec,
        secrets: Mapping[str, str],
        *,
        solves: bool,
    ) -> None:
        self.blocked = ""
        self.paused_s = 0.0
        self.results: list[ExecResult] = []
        self._instance = instance
        self._folder = folder
        self._place = (provider, sandbox_id, spec)
        self._env = expanded(instance.task.solution.env, secrets)
        self._solves = solves
        self._index = 0

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """Play the next step's solution, and answer. Raises InvalidRequest if the task has none."""
        if self._solves:
            self.results.append(await self._solve())
        self._index += 1
        answer: Message = {"role": "assistant", "content": "done"}
        return Completion(
            response=answer, finish_reason="stop", engine="solution", n_prompt_tokens=1, n_response_tokens=1
        )

    async def _solve(self) -> ExecResult:
        steps = self._instance.steps
        step = steps[self._index] if steps else None
        script = self._instance.script(step, "solution", _SOLVE)
        if not script:
            raise InvalidRequest(f"there is no solution/{_SOLVE}" + (f" for step {step.name}" if step else ""))
        provider, sandbox_id, spec = self._place
        sandbox = await provider.attach(sandbox_id, spec)
        await sandbox.upload((self._folder / script).parent, _PLACE)
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._env}
        limit_s = (step.agent.timeout_sec if step else None) or self._instance.task.agent.timeout_sec or 3600.0
        result = await sandbox.exec(["/bin/bash", f"{_PLACE}/{_SOLVE}"], timeout_s=limit_s, env=env)
        cleared = await sandbox.exec(["rm", "-rf", _PLACE], timeout_s=60.0)
        if cleared.code != 0:
            raise SandboxError(f"sandbox {sandbox_id}: {_PLACE} cannot be removed: {cleared.stderr[-300:]!r}")
        return result

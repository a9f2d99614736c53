"""Substitutes for a policy: they act in the sandbox before each answer, in place of an LLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message
from farm.tasks.harbor_instance import HarborInstance
from workers.attacks.attack import Attack
from workers.handlers.harbor.solutions import run_solution
from workers.plugins.interfaces import ExecResult, OnDelta, Sandbox
from workers.stages.stage_job import SandboxSource

_COMMAND_S = 300.0


class ActingPolicy:
    """Acts, then answers, at each call; the sandbox is None if the task has none."""

    answer = "done"

    def __init__(self, sandbox_id: str, source: SandboxSource | None) -> None:
        self.blocked = ""
        self.paused_s = 0.0
        self._sandbox_id = sandbox_id
        self._source = source
        self._index = 0

    async def act(self, sandbox: Sandbox | None, index: int) -> None:
        """Act in the sandbox, for the answer with this index. Raises FarmError."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """Act, and answer. Raises the errors of `act`."""
        source = self._source
        sandbox = None if source is None else await source.provider.attach(self._sandbox_id, source.spec)
        await self.act(sandbox, self._index)
        self._index += 1
        answer: Message = {"role": "assistant", "content": self.answer}
        return Completion(
            response=answer, finish_reason="stop", engine="solution", n_prompt_tokens=1, n_response_tokens=1
        )


class AttackPolicy(ActingPolicy):
    """Applies an attack in each step of a task, and gives its answer."""

    def __init__(self, sandbox_id: str, source: SandboxSource | None, attack: Attack) -> None:
        super().__init__(sandbox_id, source)
        self._attack = attack
        self.answer = attack.answer

    async def act(self, sandbox: Sandbox | None, index: int) -> None:
        """Write the attack's files and run its command, whose exit code is ignored."""
        if sandbox is None:
            return
        for path, text in self._attack.files.items():
            await sandbox.write_file(path, text.encode())
        if self._attack.command:
            await sandbox.exec(["/bin/bash", "-c", self._attack.command], timeout_s=_COMMAND_S)


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

"""One rollout in this process, without farm or engine: it runs through the stages and is scored.

Its policy is a substitute, which acts in the sandbox before each answer, in place of an LLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from farm.client.verb_groups import PART_BYTES
from farm.errors import RolloutError
from farm.records.request import SamplingParams
from farm.records.trajectory import Completion, Message, ModelCall
from farm.task_archive import pack
from farm.tasks.harbor_instance import HarborInstance
from workers.attacks.attack import Attack
from workers.config import own_config
from workers.handlers.harbor.solutions import run_solution
from workers.plugins.interfaces import Artefact, ExecResult, OnDelta, Policy, Sandbox, Score
from workers.sandboxes.lifecycle import layers
from workers.stages import stage_functions
from workers.stages.stage_job import Problem, SandboxSource, StageJob, resolve, resolve_problem
from workers.stages.task_archives import fetch_archive

N_ATTEMPTS = 3
T = TypeVar("T")
_COMMAND_S = 300.0


async def score_job(job: StageJob, policy_of: Callable[[Problem, SandboxSource | None], Policy]) -> Score:
    """Run a job with a policy, which is created for its sandbox if it has one, and score it. Raises FarmError."""
    problem = await asyncio.to_thread(resolve_problem, job)
    await stage_functions.init(problem)
    policy = policy_of(problem, resolve(problem).source)
    run_result = await stage_functions.run(problem, policy, _forget_call, _forget_artefact)
    try:
        score, _ = await stage_functions.evaluate(problem, run_result.submission)
    finally:
        if run_result.submission.layer is not None:
            await asyncio.to_thread(layers.discard, job.config.sandboxes, run_result.submission.layer.name)
    return score


def now() -> str:
    """Return this instant in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


async def repeated(scoring: Callable[[], Awaitable[T]]) -> T:
    """Score with a farm's number of attempts, as a fault of this machine may be temporary. Raises FarmError."""
    for _ in range(N_ATTEMPTS - 1):
        try:
            return await scoring()
        except RolloutError as error:
            if not error.retryable:
                raise
    return await scoring()


def local_archive(path: Path) -> str:
    """Add a folder to the unpacked archives of this node, if missing; return its digest. Blocks."""
    with TemporaryFile() as archive:
        name = pack(path, archive)

        def part(number: int) -> bytes | None:
            archive.seek(number * PART_BYTES)
            return archive.read(PART_BYTES) or None

        fetch_archive(own_config().archives_folder, name, part)
    return name


async def _forget_call(call: ModelCall) -> None:
    """Record nothing."""


async def _forget_artefact(turn: int, artefact: Artefact) -> str:
    """Keep nothing."""
    return ""


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

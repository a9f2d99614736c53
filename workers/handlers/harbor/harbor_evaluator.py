"""Scores of Harbor tasks: verifies the policy's last step; earlier steps were verified during the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from farm.errors import EvaluatorError, HandlerError, InvalidRequest, SandboxError, ToolError
from farm.records.request import SandboxSpec
from farm.records.variable_expansion import expanded
from farm.tasks.harbor_config import StepTable
from farm.tasks.harbor_instance import HarborInstance
from farm.tasks.ignored_files import IgnoredFiles
from workers.config import SandboxConfig
from workers.evaluators.node_conditions import observed
from workers.evaluators.process_end import ProcessEnd, Trial, settle
from workers.handlers.harbor.artefact_files import REJECTED, put_artefacts
from workers.handlers.harbor.entry_programs import begin
from workers.handlers.harbor.harbor_verifier import Tests, Unrewarded, VerifiedRewards, verify
from workers.handlers.harbor.reward_files import MAIN, Rewards, gate, total
from workers.handlers.harbor.sandbox_specs import agent_sandbox, verifier_sandbox
from workers.handlers.harbor.solutions import has_solution, run_solution, solution_s
from workers.plugins.handler import TaskContext
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission
from workers.sandboxes.images.image import fallback_note
from workers.stage_clock import off_clock

STOPPED = "stopped"
"""In the record of a step after which the task's gate ended it, with the reason."""
BROKEN = "broken"
"""In the record of a step whose successor could not begin, as the policy broke its preconditions."""
_CACHE_S = 60.0
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
_WITHOUT_REWARD = (Unrewarded, SandboxError, ToolError)
_UNSOLVED = (*_WITHOUT_REWARD, InvalidRequest)
"""Its solution may name secrets that the batch lacks."""


class HarborEvaluator:
    """The evaluator of one task; `harbor_verifier.py` defines what is trusted in a policy's sandbox."""

    name: ClassVar[str] = "harbor"

    def __init__(self, instance: HarborInstance, task: TaskContext) -> None:
        self._instance = instance
        self._task = task

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Return all rewards by name. Raises EvaluatorError if a verification gave none in a clean image either."""
        records = submission.steps
        last = records[-1] if records else {}
        verified = [dict(record["rewards"]) for record in records]
        details: dict[str, Any] = {"steps": records} if records else {}
        if STOPPED not in last and BROKEN not in last:
            if REJECTED in submission.files:
                return Score(0.0, {**details, "reason": submission.files[REJECTED]})
            verdict = await self.verify_step(self._step(len(records)), submission, fresh, timeout_s)
            verified.append(verdict.rewards)
            details |= verdict.details
            if (layer := submission.layer) is not None and layer.n_restored:
                details |= {"restored": list(layer.restored), "n_restored": layer.n_restored}
        n_missing = 0 if STOPPED in last else self._n_missing(verified)
        if n_missing:
            details["n_steps_missing"] = n_missing
        rewards = total(self._instance.task.multi_step_reward_strategy, verified, n_missing)
        # No step gave a named reward.
        return Score(details=details, rewards=rewards) if rewards else Score(0.0, details)

    async def evaluate_running(
        self, submission: Submission, sandbox: Sandbox, fresh: FreshSandbox, timeout_s: float
    ) -> Score:
        """Like `evaluate`; sandboxes opened by `fresh` reach the services of `sandbox`."""
        return await self.evaluate(submission, fresh, timeout_s)

    def _step(self, index: int) -> StepTable | None:
        return self._instance.steps[index] if self._instance.steps else None

    def _n_missing(self, verified: Sequence[Rewards]) -> int:
        """Return how many steps the policy did not reach; none if the last one's gate would have ended the task."""
        step, n = self._step(len(verified) - 1), len(self._instance.steps) - len(verified)
        return 0 if step is None or gate(step, verified[-1]) else n

    async def verify_step(
        self, step: StepTable | None, submission: Submission, fresh: FreshSandbox, timeout_s: float
    ) -> VerifiedRewards:
        """Verify one step in the sandbox of its mode, as often as `settle` requires.

        Tests that give a reward in the clean image, but none in the policy's state, are worth 0 (`details.reason`). So
        are tests that give one in the clean image only after the task's solution: tests that end without a reward if
        there is nothing to test, such as code that does not compile, report it in no other way.
        """
        archive, instance = archive_of(self._task, self._instance), self._instance
        spec = verifier_sandbox(instance, step, archive, self._task.batch.secrets)
        shared = instance.task.mode(step) == "shared"
        what = f"{instance.name}, step {step.name}" if step else instance.name
        tests = self.tests(step, archive, timeout_s)
        names = [MAIN]
        # A later step begins with the policy's state, and a separate verifier has only artefacts.
        solvable = shared and step is None and has_solution(instance, step)

        async def verified(*, clean: bool, solved: bool = False) -> VerifiedRewards:
            async with fresh(spec, layer=shared and not clean) as sandbox:
                if clean or not shared:
                    await _begin(sandbox, instance, step, what)
                if solved:
                    await run_solution(sandbox, instance, step, archive, self._task.batch.secrets)
                if not shared and not clean:
                    await put_artefacts(sandbox, submission.tree)
                if shared and not clean and submission.layer is not None and submission.layer.n_restored:
                    # The loader's cache is the image's, which does not contain newly installed libraries.
                    await sandbox.exec(["ldconfig"], timeout_s=_CACHE_S)
                return await verify(sandbox, tests, what)

        async def trial() -> Trial[VerifiedRewards]:
            verdict, reason, timed_out = None, "", False
            async with observed() as conditions:
                try:
                    verdict = await verified(clean=False)
                except _WITHOUT_REWARD as error:
                    reason, timed_out = str(error), isinstance(error, Unrewarded) and error.timed_out
            if verdict is not None:
                # Nothing tells whether a reward is full marks.
                end = ProcessEnd(0, limit_s=tests.timeout_s, conditions=conditions)
                return Trial(verdict, end, passed=not conditions.shortage)
            gone = "" if timed_out else reason
            end = ProcessEnd(None, timed_out, tests.timeout_s, gone=gone, conditions=conditions)
            return Trial(VerifiedRewards(dict.fromkeys(names, 0.0), {"reason": reason}), end)

        async def control() -> str:
            failed = ""
            for solved in (False, True) if solvable else (False,):
                try:
                    verdict = await verified(clean=True, solved=solved)
                except _UNSOLVED as error:
                    failed = failed or str(error)
                else:
                    names[:] = verdict.rewards
                    return ""
            return failed

        # Controls and a second trial get as much time as the first.
        more_s = 2 * (self._task.batch.limits.init_s + tests.timeout_s)
        if solvable:
            more_s += self._task.batch.limits.init_s + tests.timeout_s + solution_s(instance, step)
        with off_clock(more_s):
            verdict = await settle(trial, control, f"{what}: its tests")
        specs = [agent_sandbox(instance, archive, None), spec]
        notes = await asyncio.to_thread(_image_notes, self._task.config.sandboxes, specs)
        return replace(verdict, details={**verdict.details, "image": notes}) if notes else verdict

    def tests(self, step: StepTable | None, archive: Path, timeout_s: float) -> Tests:
        """Return the tests of a step, with the task's own time limit by the rule of the batch."""
        instance, limits = self._instance, self._task.batch.limits
        env = expanded(instance.verifier_env(step), self._task.batch.secrets, whole=True)
        if instance.safe_path and self._task.batch.verification == "guarded" and instance.task.mode(step) == "shared":
            env = _SAFE_PATH | env
        folders = test_folders(instance, step, archive) if instance.verifier_image(step) is None else []
        own_s = min(instance.verifier_s(step) * limits.task_time_factor, limits.task_time_cap_s)
        return Tests(folders, env, min(own_s, timeout_s), IgnoredFiles(archive))


async def _begin(sandbox: Sandbox, instance: HarborInstance, step: StepTable | None, what: str) -> None:
    of_compose = instance.verifier_image(step) is None
    try:
        if of_compose:
            await begin(sandbox, what, instance.entrypoint, instance.command, instance.healthcheck)
        else:
            await begin(sandbox, what)
    except HandlerError as error:
        raise EvaluatorError(str(error)) from error


def _image_notes(config: SandboxConfig, specs: Sequence[SandboxSpec]) -> str:
    """Return which images were built on this node because they could not be pulled; empty if none. Blocks."""
    notes = [fallback_note(config, spec.image, spec.fallback_image) for spec in specs if spec.fallback_image]
    return "; ".join(dict.fromkeys(note for note in notes if note))


def archive_of(task: TaskContext, instance: HarborInstance) -> Path:
    """Return the folder of the task. Raises EvaluatorError if the instance names no archive."""
    if task.archive is None:
        raise EvaluatorError(f"{instance.name}: the instance names no archive, so there are no tests to run")
    return task.archive


def test_folders(instance: HarborInstance, step: StepTable | None, archive: Path) -> list[Path]:
    """Return the folders that make up /tests, the later ones over the earlier."""
    names = ["tests"] + ([f"steps/{step.name}/tests"] if step else [])
    return [archive / name for name in names if (archive / name).is_dir()]

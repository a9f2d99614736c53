"""Scores of patches by the rule of their data set: the row's script in a fresh sandbox, its log graded by swebench.

1. The patch, without changes that decide about tests (`kept_changes.py`), is applied as swebench applies it.
2. The script runs up to the end of its tests. Marks and exit codes in its output are not the script's.
3. The library grades the log. A log without readable results, or contradicted by the exit code, resolves nothing.
   If it shows a fault of the environment instead, the clean tree is run: a fault there too is an EvaluatorError; a
   fault only with the patch is the patch's. A test that failed by one line and passed by another did not pass.
4. A log in which no test passed proves nothing about the patch. Its 0 stands if a test passes with the reference
   solution; a row without a solution has no such control.
5. A log is text that the code under test can write. So if pytest runs the tests, a patch that the log calls resolved
   is run again under `tests.py`, which trusts no text; see `confirmation.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from farm.errors import EvaluatorError, HandlerError, ToolError
from workers.config import SandboxConfig
from workers.evaluators.issues.confirmation import confirm
from workers.evaluators.issues.issue import Issue, cut, git, log_of, stage
from workers.evaluators.issues.kept_changes import KeptChanges, kept_changes, paths_of_patch
from workers.evaluators.issues.library import GradedLog, grade
from workers.evaluators.node_conditions import Conditions, observed
from workers.evaluators.patches import REJECTED, output_end, patch_of, script, touched, unpacked_mb
from workers.evaluators.process_end import ProcessEnd, Trial, settle
from workers.evaluators.programs import end_details
from workers.evaluators.tree_guard import SETTINGS_FILES, pytest_settings
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission
from workers.stage_clock import stopped_s

_FOLDER = "/tmp/farm-issue"  # noqa: S108  (of the sandbox, which is not shared)
_MAX_LISTED = 20
_MAX_UNPACKED_MB = 64
_MAX_ARGUMENT_BYTES = 100_000
_MAX_LOG_BYTES = 10_000_000
_FIRST_SHARE = 0.6
"""The share of the time in which the script must have run, as a resolved patch is run a second time."""
_LATE_SHARE = 0.25
_CONTROL_SHARE = 0.25
"""The share of the time after which none is left for the reference solution."""
_PASSES = ("PASSED", "XFAIL")
_WHOLE_MAP = ("PASSED", "FAILED", "ERROR")


@dataclass(frozen=True, slots=True)
class Resolution:
    """The score of one run by its log, and the status of each test that the log names."""

    score: Score
    statuses: Mapping[str, str] = field(default_factory=dict)


class IssueEvaluator:
    """The evaluator of a patch: 1.0 if swebench calls the issue resolved, and no check contradicts; else 0.0."""

    name: ClassVar[str] = "swe-bench"

    def __init__(self, issue: Issue, config: SandboxConfig) -> None:
        self._issue = issue
        self._config = config

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score a patch; an empty or rejected one scores 0.0 without a run, and so do tests that time out.

        Raises EvaluatorError if the environment or the node had a fault, or the library cannot be used.
        """
        if REJECTED in submission.files:
            return Score(0.0, {"reason": submission.files[REJECTED]})
        patch = patch_of(submission.files)
        if not patch.strip():
            return Score(0.0, {"reason": "nothing was changed"})
        if unpacked_mb(patch) > _MAX_UNPACKED_MB:
            return Score(0.0, {"reason": f"its files have more than {_MAX_UNPACKED_MB} MB"})
        kept = kept_changes(patch, self._tests(), self._issue.gold_paths)
        # Repetitions after a shortage are not charged to the stage's time.
        deadline = time.monotonic() - stopped_s() + timeout_s * 0.9

        solved = replace(self._issue, bug_patch="")
        has_solution = bool(solved.gold.strip() or self._issue.bug_patch)

        async def trial() -> Trial[Resolution]:
            run = await self._run(self._issue, kept, fresh, timeout_s * _FIRST_SHARE)
            is_late = deadline - time.monotonic() < timeout_s * (0.9 - _CONTROL_SHARE)
            return replace(run, stands=run.stands or is_late or not has_solution)

        async def control() -> str:
            solution = KeptChanges(solved.gold.encode())
            run = await self._run(solved, solution, fresh, timeout_s * _FIRST_SHARE)
            if run.end.gone or run.stands or not has_solution:
                return run.end.gone
            return f"the reference solution: {run.value.score.details.get('reason', 'no test passed')}"

        what = f"the tests of {self._issue.instance_id}"
        resolution = await settle(trial, control, what, scorer=f"{self.name} {self._issue.instance_id}")
        score = Score(resolution.score.value, {**resolution.score.details, "dropped": kept.dropped[:_MAX_LISTED]})
        if score.value != 1.0:
            return score
        left_s = deadline - (time.monotonic() - stopped_s())
        return await confirm(self._issue, score, kept.patch, resolution.statuses, fresh, left_s)

    def _tests(self) -> set[str]:
        ids = (*self._issue.fail_to_pass, *self._issue.pass_to_pass)
        return {*(test.partition("::")[0] for test in ids if "::" in test), *touched(self._issue.test_patch)}

    async def _run(self, issue: Issue, kept: KeptChanges, fresh: FreshSandbox, timeout_s: float) -> Trial[Resolution]:
        async with observed() as conditions, fresh() as sandbox:
            await self._stage(sandbox, issue, timeout_s)
            applied = await self._apply(sandbox, kept.patch, timeout_s / 4)
            if applied.code != 0:
                score = Score(0.0, {"reason": f"the patch does not apply: {output_end(applied)}"})
                return Trial(Resolution(score), ProcessEnd.of(applied, timeout_s / 4, conditions), stands=True)
            result = await self._run_script(sandbox, timeout_s)
        return await self._judged(result, timeout_s, conditions)

    async def _stage(self, sandbox: Sandbox, issue: Issue, timeout_s: float) -> None:
        try:
            await stage(sandbox, issue, timeout_s / 2)
        except (HandlerError, ToolError) as error:
            raise EvaluatorError(str(error)) from error

    async def _apply(self, sandbox: Sandbox, patch: bytes, timeout_s: float) -> ExecResult:
        """Apply the patch; then revert its changes of pytest's settings in a file with other settings."""
        if not patch.strip():
            return ExecResult(0, b"", b"")
        settings = {path for path in paths_of_patch(patch) if path.rsplit("/", 1)[-1] in SETTINGS_FILES}
        settings -= set(self._issue.gold_paths)
        before = {path: await self._text(sandbox, path) for path in settings}
        await sandbox.write_file(f"{_FOLDER}/model.patch", patch)
        applied = await git(sandbox, self._issue, script("issues/apply_patch"), timeout_s, FOLDER=_FOLDER)
        if applied.code == 0:
            for path, text in before.items():
                if _steered(path, text, await self._text(sandbox, path)):
                    await sandbox.write_file(f"{self._issue.tree}/{path}", text.encode())
        return applied

    async def _text(self, sandbox: Sandbox, path: str) -> str:
        try:
            return (await sandbox.read_file(f"{self._issue.tree}/{path}")).decode("utf-8", "replace")
        except ToolError:
            return ""

    async def _run_script(self, sandbox: Sandbox, timeout_s: float) -> ExecResult:
        script = f"exec 2>&1\n{cut(self._issue.eval_script)}"
        argv = ["bash", "-c", script]
        if len(script.encode()) > _MAX_ARGUMENT_BYTES:
            await sandbox.write_file(f"{_FOLDER}/eval.sh", script.encode())
            argv = ["bash", f"{_FOLDER}/eval.sh"]
        return await sandbox.exec(argv, timeout_s=timeout_s, cwd=self._issue.tree)

    async def _judged(self, result: ExecResult, timeout_s: float, conditions: Conditions) -> Trial[Resolution]:
        end = ProcessEnd.of(result, timeout_s, conditions)
        if result.timed_out:
            if conditions.late_s < _LATE_SHARE * timeout_s and not conditions.shortage:
                end = ProcessEnd(None, limit="the tests timed out", conditions=conditions)
            reason = f"the tests took more than {timeout_s:.0f} s"
            return Trial(Resolution(Score(0.0, {"reason": reason})), end, stands=True)
        whole = len(result.stdout) < _MAX_LOG_BYTES
        log = log_of(result.stdout.decode("utf-8", "replace"), result.code if whole else None)
        graded = await grade(self._config, self._issue, log)
        score = self._score(graded)
        if not graded.complete and graded.infra_failure and not end.limit:
            end = ProcessEnd(None, gone=f"the log shows a fault: {graded.infra_failure}", conditions=conditions)
        details = {**score.details, **end_details(result)}
        resolution = Resolution(Score(score.value, details), graded.statuses)
        return Trial(resolution, end, passed=score.value == 1.0, stands=self._has_passes(graded))

    def _has_passes(self, graded: GradedLog) -> bool:
        """Return whether a log shows that the tests run: at least one passed, if the parser names passed tests."""
        if not graded.complete or graded.refused:
            return False
        return self._issue.eval_type == "fail_only" or any(each in _PASSES for each in graded.statuses.values())

    def _score(self, graded: GradedLog) -> Score:
        issue = self._issue
        details: dict[str, Any] = {
            "unmended": list(graded.still_failing[:_MAX_LISTED]),
            "broken": list(graded.broken[:_MAX_LISTED]),
        }
        if graded.refused or not graded.complete:
            reason = graded.refused or "the log has no readable results, or contradicts the exit code of the tests"
            return Score(0.0, {**details, "reason": reason})
        resolved = graded.resolved
        wanted = {*issue.fail_to_pass, *issue.pass_to_pass}
        if issue.expected:
            resolved = whole_map(graded.statuses) == {name.split(" - ")[0]: status for name, status in issue.expected}
            wanted = set(graded.statuses)
        if resolved and (twice := sorted(wanted & set(graded.contradicted))):
            return Score(0.0, {**details, "tampered": f"{', '.join(twice[:3])} both failed and passed"})
        return Score(float(resolved), details)


def whole_map(statuses: Any) -> dict[str, str]:
    """Return statuses by R2E-Gym's names of tests: pytest's without the file, with dots."""
    return {
        ".".join(test.split("::")[1:]).split(" - ")[0]: status
        for test, status in statuses.items()
        if status in _WHOLE_MAP
    }


def _steered(path: str, before: str, after: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    try:
        return bool(pytest_settings(name, before) != pytest_settings(name, after))
    except Exception:
        # Neither file's parser documents its exceptions.
        return True

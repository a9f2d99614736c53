"""Scores of patches by the tests of their issue, run by pytest in a sandbox that the policy never touched.

The code under test runs in pytest's own process, so that process's reports are claims, checked by these rules:

* Files that decide about tests (`tree_guard.py`) are restored before any code of the patch runs.
* Outcomes go through a pipe that the tree's code cannot name, each line signed (`outcomes_plugin.py`), to a process
  next to pytest's (`outcomes_reader.py`). Printed text and exit codes say nothing.
* Canaries are planted among the tests (`canaries.py`). If every test passed and a canary misbehaved, the run
  was tampered with and scores 0; unless a canary misbehaves over the clean tree too: then the instance's command skips
  tests, which is an error of the instance.
* So are copies of the listed tests, which must fail (`canaries.py`). If a copy and its test both passed,
  failures were hidden; unless the copy passes over the clean tree too. As copies run the tests' code, they may disturb
  tests after them: a patch that failed only by such tests is run again without copies.
* The end of the run is attributed by `process_end.py`. The reader ends the tests at their limit; if its clock and the
  worker's were on time, a timeout is the policy's. Repetition needs time: an end by a signal after more than a quarter
  of the time is the policy's, which could otherwise turn each 0 into a failed rollout.
* A disk reported as full has no known cause: the control is run, and then the patch again.
* A run in which no test and no canary passed proves nothing about the patch: the plug-in, pytest or its Python may be
  broken. Its 0 stands if a test of the control passes: the tests over the reference patch or, if none applies, tests of
  the same names that do nothing, over the clean tree. The control has no file of the patch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from farm.errors import EvaluatorError
from workers.evaluators.node_conditions import observed
from workers.evaluators.outcomes import Outcomes, Planted, missing
from workers.evaluators.patches import REJECTED, NotRestored, PatchedTree, output_end, patch_of, run_program, touched
from workers.evaluators.process_end import EndCause, ProcessEnd, Trial, doing, settle
from workers.evaluators.program_source import source_of
from workers.evaluators.programs import end_details
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

_FOLDER = "/tmp/farm-tests"  # noqa: S108  (of the sandbox, which is not shared)
_MAX_LISTED = 20
_REPEATABLE_SHARE = 0.25
_LATE_SHARE = 0.25
_REPEATABLE_DISTURBED = 0.5
"""The share of the time in which a patch that copies may have disturbed is run again without them."""
MAX_KEPT_COPIES = 20
"""Number of tests to be kept that are copied, chosen at random; of those to be fixed, all are."""
_NO_SPACE = b"No space left on device"
_READER_S = 15.0
"""Seconds after its limit in which the reader may end the tests' processes and report the timeout."""


@dataclass(frozen=True, slots=True)
class TestPlan:
    """The tests of an issue: `command` runs in `tree`, `pythonpath` is relative to it; ids are pytest node ids.

    The command runs pytest once, on whole files. Tests of `may_xfail` also count if they fail as their own marks
    expect. `gold` is the reference patch, empty if there is none.
    """

    __test__: ClassVar[bool] = False

    command: str
    tree: str
    pythonpath: str
    test_patch: str
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    may_xfail: Sequence[str] = ()
    gold: str = ""

    @property
    def key(self) -> str:
        """A digest of all that decides whether outcomes can be recorded: equal for all patches of an instance."""
        decides = (self.command, self.tree, self.pythonpath, self.test_patch, self.gold)
        return hashlib.sha256("\0".join(decides).encode()).hexdigest()[:16]

    @property
    def files(self) -> list[str]:
        """The paths of tests: those of the ids, and those that the test patch changes."""
        ids = (*self.fail_to_pass, *self.pass_to_pass)
        return list(dict.fromkeys([*(test.partition("::")[0] for test in ids), *touched(self.test_patch)]))


@dataclass(frozen=True, slots=True)
class _Run:
    """The score of a run of the tests, and the reasons to distrust it; empty if there are none.

    `passing_copies` are the tests whose copies passed. `disturbed`: copies may have prevented a full score.
    """

    score: Score
    tampered: str = ""
    passing_copies: frozenset[str] = frozenset()
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class _Control:
    """A run over the clean tree: how canaries failed, and the tests whose copies passed."""

    failed: str = ""
    passing_copies: frozenset[str] = frozenset()


class UnfitTests(EvaluatorError):
    """Canaries cannot check the tests of an instance, for example if some tests do not run over a clean tree."""


class PytestEvaluator:
    """The evaluator of a patch: 1.0 if all tests to be fixed and all tests to be kept pass, else 0.0.

    `clean` opens the sandboxes of controls, if those for the patch may contain parts of it.
    """

    name: ClassVar[str] = "pytest"

    def __init__(self, plan: TestPlan, clean: FreshSandbox | None = None) -> None:
        self._plan = plan
        self._clean = clean

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score a patch. Tests that time out score 0.0, and so does a tampered run (`details.tampered`).

        Raises EvaluatorError if git or pytest is missing, the test patch fails, no outcomes can be recorded, or the
        node had a fault.
        """
        if REJECTED in submission.files:
            return Score(0.0, {"reason": submission.files[REJECTED]})
        patch = patch_of(submission.files)
        deadline = time.monotonic() + timeout_s * 0.9

        started = time.monotonic()

        async def settled(copied: Sequence[str]) -> _Run:
            was_short = False

            def until() -> float:
                # Repetitions after a shortage get the full time again, off the stage's clock.
                return time.monotonic() + timeout_s * 0.9 if was_short else deadline

            async def trial() -> Trial[_Run]:
                nonlocal deadline, was_short
                deadline = until()
                run = await self._trial(patch, copied, fresh, timeout_s, deadline)
                was_short = bool(run.end.conditions.shortage)
                return run

            async def control() -> str:
                return await self._works(clean, timeout_s, until())

            return await settle(trial, control, "the tests of a patch", scorer=f"{self.name} {self._plan.key}")

        clean = self._clean or fresh

        copied = self._copied()
        run = await settled(copied)
        if run.disturbed and time.monotonic() - started < _REPEATABLE_DISTURBED * (deadline - started):
            copied = []
            run = await settled(copied)
            n_tests = sum(run.score.details.get("uncopied", {}).values())
            left_out = {"uncopied": {"a test failed next to the copies": n_tests}}
            run = replace(run, score=Score(run.score.value, {**run.score.details, **left_out}))
        if not run.tampered and not run.passing_copies:
            return run.score
        control = await self._control(copied, clean, timeout_s, deadline)
        if run.tampered:
            if control.failed:
                why = f"the tests' command does not work with canaries, name files instead of tests: {control.failed}"
                raise UnfitTests(why)
            return Score(0.0, {**run.score.details, "tampered": run.tampered})
        if hidden := sorted(run.passing_copies - control.passing_copies):
            why = f"a copy of {', '.join(hidden[:3])} passed, and must fail: its last assertion is wrong"
            return Score(0.0, {**run.score.details, "tampered": why})
        return run.score

    def _copied(self) -> list[str]:
        """Return the ids, without parameters, of the tests to copy."""
        fixed = dict.fromkeys(test.partition("[")[0] for test in self._plan.fail_to_pass)
        kept = {test.partition("[")[0] for test in self._plan.pass_to_pass} - fixed.keys()
        drawn = secrets.SystemRandom().sample(sorted(kept), min(len(kept), MAX_KEPT_COPIES))
        return [*fixed, *drawn]

    async def _trial(
        self, patch: bytes, copied: Sequence[str], fresh: FreshSandbox, timeout_s: float, deadline: float
    ) -> Trial[_Run]:
        async with observed() as conditions, fresh() as sandbox:
            tree, plugins = await self._clean_tree(sandbox, timeout_s)
            applied = await tree.apply_policy(patch)
            if applied.code != 0:
                end = ProcessEnd.of(applied, timeout_s / 4, conditions)
                if _NO_SPACE in applied.stderr and not applied.limit:
                    end = ProcessEnd(None, gone="no space was left for the patch", conditions=conditions)
                score = Score(0.0, {"reason": f"the patch does not apply: {output_end(applied)}"})
                return Trial(_Run(score), end, stands=True)
            try:
                restored = await tree.apply_tests(self._plan.test_patch, self._plan.files)
                planted = await tree.plant(self._plan.files, copied)
            except (NotRestored, EvaluatorError) as error:
                return Trial(_Run(Score(0.0, {"reason": str(error)})), ProcessEnd(None, conditions=conditions))
            result, seen = await self._run_tests(sandbox, plugins, deadline)
        run = self._score(seen, planted)
        details = {**run.score.details, "n_restored": len(restored), **end_details(_shown(result, seen))}
        end = _end(result, seen, conditions, deadline, timeout_s)
        is_late = _used_s(deadline, timeout_s) > _REPEATABLE_SHARE * timeout_s
        stands = is_late or (seen is not None and seen.outcomes.has_passes)
        run = replace(run, score=Score(run.score.value, details))
        return Trial(run, end, passed=run.score.value == 1.0, stands=stands)

    async def _works(self, clean: FreshSandbox, timeout_s: float, deadline: float) -> str:
        """Run tests that must pass; return how they failed, empty if one passed, or if there was no time."""
        async with clean() as sandbox:
            tree, plugins = await self._clean_tree(sandbox, timeout_s)
            applied = await tree.apply_policy(self._plan.gold.encode())
            is_solved = bool(self._plan.gold.strip()) and applied.code == 0
            try:
                await tree.apply_tests(self._plan.test_patch, self._plan.files)
            except NotRestored as error:
                return str(error)
            if is_solved:
                await tree.plant(self._plan.files)
            else:
                await tree.replace_tests([*self._plan.fail_to_pass, *self._plan.pass_to_pass], self._plan.files)
            now = time.monotonic()
            if now >= deadline:
                return ""
            result, seen = await self._run_tests(sandbox, plugins, now + (deadline - now) / 2)
            if seen is None:
                return f"the tests of the clean tree did not run: {output_end(result)}"
            if seen.timed_out or seen.outcomes.has_passes:
                return ""
            return f"no test was reported as passed: {output_end(_shown(result, seen))}"

    async def _control(self, copied: Sequence[str], fresh: FreshSandbox, timeout_s: float, deadline: float) -> _Control:
        """Run the tests over the clean tree; the result is empty if there is no time."""
        async with fresh() as sandbox:
            tree, plugins = await self._clean_tree(sandbox, timeout_s)
            try:
                await tree.apply_tests(self._plan.test_patch, self._plan.files)
            except NotRestored as error:
                return _Control(str(error))
            planted = await tree.plant(self._plan.files, copied)
            now = time.monotonic()
            if now >= deadline:
                return _Control()
            # The clean tree may hang, and the patch may have to be run again.
            result, seen = await self._run_tests(sandbox, plugins, now + (deadline - now) / 2)
            if seen is None:
                return _Control(f"the tests of the clean tree did not run: {output_end(result)}")
            if seen.timed_out:
                return _Control()
            failed = ", ".join(seen.outcomes.misbehaving(planted.canaries)[:3])
            return _Control(failed, frozenset(seen.outcomes.passing_copies(planted)))

    async def _clean_tree(self, sandbox: Sandbox, timeout_s: float) -> tuple[PatchedTree, list[str]]:
        """Return the tree before the patch, and pytest's plug-ins in its environment."""
        tree = PatchedTree(sandbox, self._plan.tree, _FOLDER, timeout_s / 4, self._plan.pythonpath)
        plugins = await tree.survey()
        await tree.baseline()
        return tree, plugins

    async def _run_tests(
        self, sandbox: Sandbox, plugins: Sequence[str], deadline: float
    ) -> tuple[ExecResult, _Seen | None]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise EvaluatorError(f"sandbox {sandbox.sandbox_id}: preparing the tree left no time for the tests")
        plugin, key = f"_{secrets.token_hex(4)}", secrets.token_hex(32)
        options = [word for name in (plugin, *plugins) for word in ("-p", name)]
        request = {
            "command": self._plan.command,
            "tree": self._plan.tree,
            "pythonpath": [f"{self._plan.tree}/{path}" for path in self._plan.pythonpath.split(":")],
            "limit_s": left_s,
            "plugin": plugin,
            "source": source_of("outcomes_plugin"),
            "key": key,
            "env": {
                "PYTEST_ADDOPTS": shlex.join(options),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        }
        result = await run_program(sandbox, "outcomes_reader", request, left_s + _READER_S)
        return result, _Seen.parse(result, key.encode())

    def _score(self, seen: _Seen | None, planted: Planted) -> _Run:
        """Return the score by the outcomes only, and the reasons to distrust them."""
        outcomes = seen.outcomes if seen else Outcomes((), ())
        still_failing = missing(outcomes, self._plan.fail_to_pass, self._plan.may_xfail)
        broken = missing(outcomes, self._plan.pass_to_pass)
        success = not still_failing and not broken and not (seen and seen.timed_out)
        odd = outcomes.misbehaving(planted.canaries)
        tampered = outcomes.forged or ", ".join(odd[:3])
        details = {
            "n_fail_to_pass": [len(self._plan.fail_to_pass) - len(still_failing), len(self._plan.fail_to_pass)],
            "n_pass_to_pass": [len(self._plan.pass_to_pass) - len(broken), len(self._plan.pass_to_pass)],
            "unmended": still_failing[:_MAX_LISTED],
            "broken": broken[:_MAX_LISTED],
            "n_canaries": outcomes.n_reported(planted.canaries),
            **self._copy_details(outcomes, planted),
        }
        score = Score(float(success), details)
        if success:
            passing = {test for test, passed in outcomes.passing_copies(planted).items() if passed}
            return _Run(score, tampered, frozenset(passing))
        if seen is None or seen.timed_out or not planted.copies or outcomes.passing_copies(planted):
            return _Run(score)
        return _Run(score, disturbed=outcomes.may_be_disturbed([*still_failing, *broken], planted))

    def _copy_details(self, outcomes: Outcomes, planted: Planted) -> dict[str, Any]:
        """Return the counts of correctly failed copies, of all copies, and of tests without one by reason."""
        n_copies = sum(map(len, planted.copies.values()))
        listed = {test.partition("[")[0] for test in (*self._plan.fail_to_pass, *self._plan.pass_to_pass)}
        reasons = Counter(planted.uncopied.values())
        if n_others := len(listed) - n_copies - reasons.total():
            reasons["it was not chosen, or its file cannot have copies"] = n_others
        return {"n_copies": [outcomes.n_failing_copies(planted), n_copies], "uncopied": dict(reasons)}


@dataclass(frozen=True, slots=True)
class _Seen:
    outcomes: Outcomes
    output: bytes
    code: int
    timed_out: bool
    cpu_s: float
    late_s: float
    wall_s: float

    @classmethod
    def parse(cls, result: ExecResult, key: bytes) -> _Seen | None:
        """Parse the reader's report; return None if the reader did not finish."""
        if result.code != 0:
            return None
        try:
            report: dict[str, Any] = json.loads(result.stdout)
            outcomes = Outcomes.parse(base64.b64decode(report.pop("records")), key)
            return cls(outcomes, base64.b64decode(report.pop("output")), **report)
        except (ValueError, TypeError, KeyError):
            return None


def _shown(result: ExecResult, seen: _Seen | None) -> ExecResult:
    return result if seen is None else ExecResult(seen.code, seen.output, b"", seen.timed_out, result.limit)


def _end(result: ExecResult, seen: _Seen | None, conditions: Any, deadline: float, timeout_s: float) -> ProcessEnd:
    """Return the end of the tests' command, for `process_end.py`; see this module's rules."""
    limit = result.limit
    late_s = conditions.late_s
    on_time = not conditions.shortage and seen is not None and max(late_s, seen.late_s) < _LATE_SHARE * seen.wall_s
    if seen is not None and seen.timed_out and on_time:
        limit = limit or "the tests timed out"
    used_s = _used_s(deadline, timeout_s)
    if seen is None:
        end = ProcessEnd.of(result, timeout_s, conditions)
    else:
        end = ProcessEnd(
            seen.code,
            seen.timed_out,
            seen.wall_s,
            limit,
            cpu_s=seen.cpu_s,
            waited_s=seen.late_s,
            conditions=conditions,
        )
    if doing(end)[0] is EndCause.UNKNOWN and not conditions.shortage and used_s > _REPEATABLE_SHARE * timeout_s:
        return ProcessEnd(end.code, limit=f"{end.kind}, too late for a retry", conditions=conditions)
    return end


def _used_s(deadline: float, timeout_s: float) -> float:
    return timeout_s * 0.9 - (deadline - time.monotonic())

"""Scores of programs by tests of their output, or of the values of one function.

The sandbox gets only the input of one test at a time, on the standard input of the program's own process. It never gets
expected values, so that a program can forge nothing but the right output. Outputs are compared here, in the worker, as
data, also by the authors' rule of a row's form. A row's checker runs in a sandbox that the program never touched.
`process_end.py` attributes the end of a failed test, and of tests that together take too long, with a program that must
pass as the control.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from farm.errors import EvaluatorError, SandboxError, ToolError
from farm.records.request import SandboxLimits
from workers.evaluators.authors_score import AuthorsScore, with_authors
from workers.evaluators.node_conditions import Conditions, observed
from workers.evaluators.process_end import EndCause, ProcessEnd, Trial, doing, settle
from workers.evaluators.program_source import source_of
from workers.evaluators.program_tests.form_rules import CallTest, FormRule, HiddenTests, StreamTest, Values, form_rule
from workers.evaluators.program_tests.output_comparison import FORM, same_output, same_value, tolerance_of
from workers.evaluators.program_tests.program_supervisor import COMPUTED, LEFT_BEHIND, SLEPT, WAITED
from workers.evaluators.program_values import NotData, packed, unpacked
from workers.evaluators.programs import ProgramEvaluator
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

MAX_OUTPUT = 8_000_000
"""Maximum bytes of output of one test; above it the test fails."""
_FOLDER = "/tmp/program"  # noqa: S108  (of the sandbox, which is not shared)
_WALL_FACTOR = 4.0
_MIN_WALL_S = 20.0
"""A program's limit is CPU time; by the clock it gets more, as the machine may be busy."""
_GRACE_PERIOD_S = 15.0
"""Seconds in addition to a test's time in which the supervisor, which enforces it, may end the program."""
RULE = "asserts"
SOLUTION = "solution.py"
"""The file of a submission that contains the program."""
AUTHORS_SOLUTION = "authors/solution.py"
"""The program that the authors of the row's form extract from the answer, if it differs."""
_STREAM_WORKS = HiddenTests((StreamTest("1\n", "1\n"),)), "print(input())\n"
_CALL_WORKS = HiddenTests((CallTest((1,), (1,)),), function="f"), "def f(x): return x\n"
_SHOWN = 300
_TRIAL_SHARE = 0.4
"""The share of an evaluator's time for one run of all tests, as a program may have to be run twice."""
_LEAST_SHARE = 0.5
"""The share of that in which all tests must end for a program that does nothing: else the time is too short."""


class CaseRunner:
    """Runs a program once for each test."""

    def __init__(self, sandbox: Sandbox, tests: HiddenTests) -> None:
        self._sandbox = sandbox
        self._imports = form_rule(tests.rule).imports if tests.rule else ""
        self._tests = tests
        self.wall_s = max(_MIN_WALL_S, _WALL_FACTOR * tests.time_s)
        cpu_s = max(1, math.ceil(tests.time_s))
        self._limits = SandboxLimits(cpu_s=cpu_s, memory_mb=tests.memory_mb, file_mb=64)
        supervisor = source_of("program_tests.descendants", "program_tests.program_supervisor")
        self._supervisor = ["python3", "-I", "-B", "-c", supervisor, str(self.wall_s), str(tests.time_s)]

    async def run(self, program: str, test: StreamTest | CallTest) -> tuple[ExecResult, ProcessEnd]:
        """Run a program on the input of a test. Raises SandboxError; ToolError if files cannot be written any more."""
        folder = _new_folder()
        path = f"{folder}/solution.py"
        await self._sandbox.write_file(path, program.encode("utf-8", "replace"))
        if isinstance(test, CallTest):
            source = source_of("program_values", "program_tests.usual_names", "program_tests.function_call")
            command = ["python3", "-B", "-c", source, path, self._tests.function, self._imports]
            return await self._exec(command, json.dumps(packed(list(test.arguments))), folder)
        if self._imports:
            source = source_of("program_tests.usual_names", "program_tests.stream_program")
            return await self._exec(["python3", "-B", "-c", source, path, self._imports], test.stdin, folder)
        return await self._exec(["python3", "-B", path], test.stdin, folder)

    async def check(self, checker: str, test: StreamTest, output: str) -> tuple[ExecResult, ProcessEnd]:
        """Run the row's checker on an output; exit code 0 accepts it. It gets `{input, output, expected}` as JSON."""
        folder = _new_folder()
        await self._sandbox.write_file(f"{folder}/checker.py", checker.encode())
        content = json.dumps({"input": test.stdin, "output": output, "expected": test.expected})
        return await self._exec(["python3", "-I", "-B", f"{folder}/checker.py"], content, folder)

    async def _exec(self, command: list[str], stdin: str, folder: str) -> tuple[ExecResult, ProcessEnd]:
        async with observed() as conditions:
            result = await self._sandbox.exec(
                [*self._supervisor, *command],
                timeout_s=self.wall_s + _GRACE_PERIOD_S,
                stdin=stdin.encode("utf-8", "replace"),
                cwd=folder,
                limits=self._limits,
            )
        if result.code not in (COMPUTED, WAITED, SLEPT):
            return result, ProcessEnd.of(result, self.wall_s, conditions)
        end = ProcessEnd(
            None,
            timed_out=True,
            limit_s=self.wall_s,
            limit=result.limit,
            cpu_limit_s=self._tests.time_s,
            cpu_s=self._tests.time_s if result.code == COMPUTED else 0.0,
            waited_s=self.wall_s if result.code == WAITED else 0.0,
            conditions=conditions,
        )
        return replace(result, code=None, timed_out=True), end


def _new_folder() -> str:
    """Return a folder name that no earlier test can have prepared or occupied."""
    return f"{_FOLDER}-{secrets.token_hex(8)}"


def left_behind(result: ExecResult) -> bool:
    """Return whether processes of a run may still live: its supervisor says so, or was itself ended."""
    return result.code in (LEFT_BEHIND, 137) or (result.code or 0) < 0


def output_of(result: ExecResult) -> str | None:
    """Return the output of a run as text; None if it is too large."""
    return result.stdout.decode("utf-8", "replace") if len(result.stdout) <= MAX_OUTPUT else None


def value_of(result: ExecResult) -> Any:
    """Return the value of a function. Raises NotData for an invalid output."""
    try:
        return unpacked(json.loads(result.stdout[: MAX_OUTPUT + 1]))
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotData(f"no value: {type(error).__name__}") from None


class AssertsEvaluator:
    """Scores 1.0 if all asserts hold, else 0.0, for both rewards: the asserts run unchanged."""

    name: ClassVar[str] = ProgramEvaluator.name

    def __init__(self, setup: str, check: str, function: str) -> None:
        self._asserts = ProgramEvaluator(setup, check, function)

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score the program. Raises EvaluatorError if a fault of the farm ended it, SandboxError without a sandbox."""
        score = await self._asserts.evaluate(submission, fresh, timeout_s)
        return with_authors(score, AuthorsScore(RULE, score.value, right=score.value == 1.0))


class ProgramTestsEvaluator:
    """Scores 1.0 if all hidden tests pass, else 0.0; or, with `partial`, the share that passes.

    `reference` is a program that computes the expected values, for tests that have none. A row with a rule has two
    named rewards, `farm` and `authors`; the latter scores the program that the authors extract from the answer.
    """

    name: ClassVar[str] = "program-tests"

    def __init__(self, tests: HiddenTests, reference: str = "") -> None:
        self._rule = form_rule(tests.rule, tests.function) if tests.rule else None
        self._tests = replace(tests, tests=tuple(_as_called(test, self._rule) for test in tests.tests))
        self._reference = reference

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score the program. Raises EvaluatorError if a fault of the farm ended a test, or the reference fails."""
        program = submission.files.get(SOLUTION, "")
        of_authors = submission.files.get(AUTHORS_SOLUTION)
        lacks_expected = any(isinstance(test, CallTest) and not test.expected for test in self._tests.tests)
        tests = await self._with_expected(fresh) if self._reference and lacks_expected else self._tests
        verdict = await self._verdict(tests, program, fresh, timeout_s)
        if of_authors is not None:
            taken = await self._verdict(tests, of_authors, fresh, timeout_s)
            verdict = replace(verdict, authors=taken.authors and replace(taken.authors, answer=of_authors))
        return verdict.score if verdict.authors is None else with_authors(verdict.score, verdict.authors)

    async def _verdict(self, tests: HiddenTests, program: str, fresh: FreshSandbox, timeout_s: float) -> _Verdict:
        if not program.strip():
            score = Score(0.0, {"reason": "there is no program: no file, and no fenced block in the answer"})
            return _Verdict(score, self._rule.score((), len(tests.tests), is_call=True) if self._rule else None)
        limit_s = timeout_s * _TRIAL_SHARE
        last: list[Trial[_Verdict]] = []

        async def trial() -> Trial[_Verdict]:
            last[:] = [await _trial(fresh, tests, program, limit_s)]
            return last[0]

        is_call = isinstance(tests.tests[0], CallTest)
        works, program_that_works = _CALL_WORKS if is_call else _STREAM_WORKS

        async def control() -> str:
            passes = await _trial(fresh, works, program_that_works, limit_s)
            details = passes.value.score.details
            if not passes.passed:
                return f"a program that is right: {details}"
            least_s = details["tests_s"] * len(tests.tests)
            if last[0].value.score.details.get("overran") and least_s > _LEAST_SHARE * limit_s:
                return (
                    f"{len(tests.tests)} runs of a program that prints its input would take {least_s:.0f} s of the "
                    f"{limit_s:.0f} s: raise the batch's limits.eval_s"
                )
            return ""

        scorer = f"{self.name} of {'calls' if is_call else 'streams'}"
        return await settle(trial, control, "the program", scorer=scorer)

    async def _with_expected(self, fresh: FreshSandbox) -> HiddenTests:
        """Return the tests; the reference computes missing values, before the program runs, in another sandbox."""
        tests: list[StreamTest | CallTest] = []
        async with fresh() as sandbox:
            runner = CaseRunner(sandbox, self._tests)
            for number, test in enumerate(self._tests.tests):
                if not isinstance(test, CallTest) or test.expected:
                    tests.append(test)
                    continue
                run, end = await runner.run(self._reference, test)
                try:
                    tests.append(replace(test, expected=(value_of(run),)))
                except NotData as error:
                    last = run.stderr[-_SHOWN:].decode(errors="replace")
                    raise EvaluatorError(f"test {number}: the reference gives {error}; {end.kind}: {last}") from None
        return replace(self._tests, tests=tuple(tests))


def _as_called(test: StreamTest | CallTest, rule: FormRule | None) -> StreamTest | CallTest:
    """Return a test with the arguments that the form's rule passes to a function."""
    if rule is None or not isinstance(test, CallTest):
        return test
    return replace(test, arguments=rule.arguments(test.arguments))


@dataclass(frozen=True, slots=True)
class _Verdict:
    score: Score
    authors: AuthorsScore | None = None


async def _trial(fresh: FreshSandbox, tests: HiddenTests, program: str, timeout_s: float) -> Trial[_Verdict]:
    rule = form_rule(tests.rule, tests.function) if tests.rule else None
    n, is_call = len(tests.tests), isinstance(tests.tests[0], CallTest)
    try:
        async with observed() as conditions, fresh() as sandbox:
            began = time.monotonic()
            runs = await _runs(CaseRunner(sandbox, tests), tests, rule, program, timeout_s, conditions)
            tests_s = round(time.monotonic() - began, 3)
    except SandboxError as error:
        end = ProcessEnd(None, gone=str(error), conditions=conditions)
        score = Score(0.0, {"reason": f"it ended its sandbox: {error}"})
        return Trial(_Verdict(score, rule.score((), n, is_call=True) if rule else None), end)
    authors = rule.score([run.authors for run in runs], n, is_call) if rule else None
    runs = [replace(run, end=run.end.within(conditions)) for run in runs]
    if tests.compare == "checker":
        runs = await _checked(fresh, tests, runs)
    failed = [(number, run) for number, run in enumerate(runs) if run.failure]
    # After a failure tests run only for the authors' score, if the row wants no share.
    n_passed = len(runs) - len(failed) if tests.partial or not failed else failed[0][0]
    details: dict[str, Any] = {"n_tests": n, "n_passed": n_passed, "passed": not failed, "tests_s": tests_s}
    if runs[-1].overran:
        details["overran"] = True
    if not failed:
        return Trial(_Verdict(Score(1.0, details), authors), runs[-1].end, passed=True)
    # A failure that may be the farm's comes before all others.
    number, run = next((each for each in failed if doing(each[1].end)[0] is not EndCause.POLICY), failed[0])
    details |= {"reason": f"test {number}: {run.failure}", "exit_code": run.end.code, "timed_out": run.end.timed_out}
    details |= {"last_words": run.stderr.decode("utf-8", "replace")}
    return Trial(_Verdict(Score(n_passed / n if tests.partial else 0.0, details), authors), run.end)


@dataclass(frozen=True, slots=True)
class _Run:
    """The run of one test: why it failed, its end, the end of its standard error, its output for a checker.

    `authors`: it passes by the authors' comparison. `overran`: it was not run, as the time of all tests was over.
    """

    failure: str
    end: ProcessEnd
    stderr: bytes
    output: str = ""
    authors: bool = False
    overran: bool = False


async def _runs(
    runner: CaseRunner,
    tests: HiddenTests,
    rule: FormRule | None,
    program: str,
    timeout_s: float,
    conditions: Conditions,
) -> list[_Run]:
    """Run the tests until `timeout_s` have passed; `conditions` are those of all of them."""
    runs: list[_Run] = []
    values = rule.values() if rule else None
    began = time.monotonic()
    for test in tests.tests:
        if (spent_s := time.monotonic() - began) > timeout_s:
            why = f"{len(runs)} of {len(tests.tests)} tests took {spent_s:.0f} s, more than limits.eval_s has for all"
            end = ProcessEnd(None, timed_out=True, limit_s=timeout_s, conditions=conditions)
            runs.append(_Run(why, end, b"", overran=True))
            break
        try:
            ran, end = await runner.run(program, test)
        except ToolError as error:
            if not runs:
                raise
            # The first run has shown that files can be written here: the program caused the change.
            runs.append(_Run(f"it left a sandbox in which no program can be written: {error}", runs[-1].end, b""))
            break
        output = (output_of(ran) or "") if tests.compare == "checker" else ""
        # Millions of numbers take seconds, too long for the event loop.
        failure, authors = await asyncio.to_thread(_compared, ran, test, tests, rule, values)
        runs.append(_Run(failure, end, ran.stderr[-_SHOWN:], output, authors))
        is_over = bool(failure) and not tests.partial
        if rule and rule.needs_more([run.authors for run in runs], isinstance(test, CallTest)):
            is_over = False
        if is_over or (failure and left_behind(ran)):
            break
    return runs


def _compared(
    result: ExecResult, test: StreamTest | CallTest, tests: HiddenTests, rule: FormRule | None, values: Values | None
) -> tuple[str, bool]:
    """Return why a run does not pass its test, and whether it passes by the authors' comparison.

    The first is empty if it passes, or if the checker decides.
    """
    if failure := _failure(result):
        return failure, False
    if isinstance(test, StreamTest):
        output = output_of(result)
        if output is None:
            return "too much output", False
        authors = rule is not None and rule.outputs(output, test.expected)
        if tests.compare == "checker":
            return "", authors
        if rule is not None and tests.compare == FORM:
            same = rule.farm_outputs(output, test.expected)
        else:
            same = same_output(output, test.expected, tests.compare)
        return "" if same else "wrong output", authors
    try:
        value = value_of(result)
    except NotData as error:
        return str(error), False
    authors = values is not None and values(test.arguments, value, test.expected[0])
    if rule is not None and tests.compare == FORM:
        same = any(rule.farm_values(test.arguments, value, expected) for expected in test.expected)
    else:
        eps = tolerance_of(tests.compare)
        same = any(same_value(value, expected, eps) for expected in test.expected)
    return "" if same else "wrong value", authors


def _failure(result: ExecResult) -> str:
    if result.timed_out:
        return "out of time"
    if result.code == LEFT_BEHIND:
        return "its processes could not be ended"
    if result.code != 0:
        return result.limit or f"exit code {result.code}"
    return ""


async def _checked(fresh: FreshSandbox, tests: HiddenTests, runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs, with those marked as failed whose output the row's checker does not accept."""
    checked = []
    async with fresh() as sandbox:
        runner = CaseRunner(sandbox, tests)
        for run, test in zip(runs, tests.tests, strict=False):
            assert isinstance(test, StreamTest)
            if run.failure or (refused := await _refused(runner, tests.checker, test, run.output)) is None:
                checked.append(run)
                continue
            failed = replace(run, failure="the checker does not accept the output")
            checked.append(replace(failed, end=refused) if refused.conditions.shortage else failed)
    return checked


async def _refused(runner: CaseRunner, checker: str, test: StreamTest, output: str) -> ProcessEnd | None:
    """Return the checker's end if it refuses an output. Raises EvaluatorError if it refuses the expected one, too."""
    result, end = await runner.check(checker, test, output)
    if result.code == 0:
        return None
    cause, reason = doing(end)
    if cause is EndCause.FARM:
        raise EvaluatorError(f"the checker of an output: {reason}; it is scored again")
    control, _ = await runner.check(checker, test, test.expected)
    if control.code != 0:
        last = control.stderr[-_SHOWN:].decode(errors="replace")
        raise EvaluatorError(f"the checker does not accept the expected output: {last}")
    return end

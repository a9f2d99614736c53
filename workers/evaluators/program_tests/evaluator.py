"""Scores of programs by tests of their output, or of the values of one function of theirs.

Only the input of one test at a time is in the sandbox, on the standard input of the program's own process; what is
expected never is, so that a program can forge nothing but the right output. Outputs are compared here, in the worker,
as data. A row's checker runs in a sandbox that the program never touched. `process_end.py` decides what caused the end
of a test that failed, and of tests that together take too long, with a program that must pass as the control.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from farm.errors import EvaluatorError, SandboxError, ToolError
from workers.evaluators.node_conditions import Conditions, observed
from workers.evaluators.process_end import EndCause, ProcessEnd, Trial, doing, settle
from workers.evaluators.program_tests.case_runner import CaseRunner, left_behind, output_of, value_of
from workers.evaluators.program_tests.hidden_tests import CallTest, HiddenTests, StreamTest
from workers.evaluators.program_tests.output_comparison import same_output, same_value, tolerance_of
from workers.evaluators.program_tests.program_supervisor import LEFT_BEHIND
from workers.evaluators.program_values import NotData
from workers.interfaces import ExecResult, FreshSandbox, Score, Submission

SOLUTION = "solution.py"
"""The file of a submission that holds the program."""
_STREAM_WORKS = HiddenTests((StreamTest("1\n", "1\n"),)), "print(input())\n"
_CALL_WORKS = HiddenTests((CallTest((1,), (1,)),), function="f"), "def f(x): return x\n"
_SHOWN = 300
_TRIAL_SHARE = 0.4
"""The share of an evaluator's time for one run of all tests, as a program may have to be run twice."""
_LEAST_SHARE = 0.5
"""The share of that in which all tests must end if the program does nothing: else the time is too short for them."""


class ProgramTestsEvaluator:
    """Scores 1.0 if all hidden tests pass, else 0.0; or, with `partial`, the share of them that passes.

    `reference` is a program whose values are the expected ones, for tests that have none.
    """

    name: ClassVar[str] = "program-tests"

    def __init__(self, tests: HiddenTests, reference: str = "") -> None:
        self._tests = tests
        self._reference = reference

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Score the program. Raises EvaluatorError if a fault of the farm ended a test, or the reference fails."""
        program = submission.files.get(SOLUTION, "")
        if not program.strip():
            return Score(0.0, {"reason": "there is no program: no file, and no fenced block in the answer"})
        tests = await self._with_expected(fresh) if self._reference and self._lacks_expected() else self._tests

        limit_s = timeout_s * _TRIAL_SHARE
        last: list[Trial[Score]] = []

        async def trial() -> Trial[Score]:
            last[:] = [await _trial(fresh, tests, program, limit_s)]
            return last[0]

        is_call = isinstance(tests.tests[0], CallTest)
        works, program_that_works = _CALL_WORKS if is_call else _STREAM_WORKS

        async def control() -> str:
            passes = await _trial(fresh, works, program_that_works, limit_s)
            if not passes.passed:
                return f"a program that is right: {passes.value.details}"
            least_s = passes.value.details["tests_s"] * len(tests.tests)
            if last[0].value.details.get("overran") and least_s > _LEAST_SHARE * limit_s:
                return (
                    f"{len(tests.tests)} runs of a program that prints its input would take {least_s:.0f} s of the "
                    f"{limit_s:.0f} s: raise the batch's limits.eval_s"
                )
            return ""

        scorer = f"{self.name} of {'calls' if is_call else 'streams'}"
        return await settle(trial, control, "the program", scorer=scorer)

    def _lacks_expected(self) -> bool:
        return any(isinstance(test, CallTest) and not test.expected for test in self._tests.tests)

    async def _with_expected(self, fresh: FreshSandbox) -> HiddenTests:
        """Return the tests, those without values with the reference's, which is run before the program, elsewhere."""
        result: list[StreamTest | CallTest] = []
        async with fresh() as sandbox:
            runner = CaseRunner(sandbox, self._tests)
            for number, test in enumerate(self._tests.tests):
                if not isinstance(test, CallTest) or test.expected:
                    result.append(test)
                    continue
                run, end = await runner.run(self._reference, test)
                try:
                    result.append(replace(test, expected=(value_of(run),)))
                except NotData as error:
                    last = run.stderr[-_SHOWN:].decode(errors="replace")
                    raise EvaluatorError(f"test {number}: the reference gives {error}; {end.kind}: {last}") from None
        return replace(self._tests, tests=tuple(result))


async def _trial(fresh: FreshSandbox, tests: HiddenTests, program: str, timeout_s: float) -> Trial[Score]:
    """Run the tests once, one after the other, in a fresh sandbox."""
    try:
        async with observed() as conditions, fresh() as sandbox:
            began = time.monotonic()
            runs = await _runs(CaseRunner(sandbox, tests), tests, program, timeout_s, conditions)
            tests_s = round(time.monotonic() - began, 3)
    except SandboxError as error:
        end = ProcessEnd(None, gone=str(error), conditions=conditions)
        return Trial(Score(0.0, {"reason": f"it ended its sandbox: {error}"}), end)
    runs = [replace(run, end=run.end.within(conditions)) for run in runs]
    if tests.compare == "checker":
        runs = await _checked(fresh, tests, runs)
    failed = [(number, run) for number, run in enumerate(runs) if run.failure]
    n, n_passed = len(tests.tests), len(runs) - len(failed)
    details: dict[str, Any] = {"n_tests": n, "n_passed": n_passed, "passed": not failed, "tests_s": tests_s}
    if runs[-1].overran:
        details["overran"] = True
    if not failed:
        return Trial(Score(1.0, details), runs[-1].end, passed=True)
    # one that may be the farm's doing comes before all that are not
    number, run = next((each for each in failed if doing(each[1].end)[0] is not EndCause.POLICY), failed[0])
    details |= {"reason": f"test {number}: {run.failure}", "exit_code": run.end.code, "timed_out": run.end.timed_out}
    details |= {"last_words": run.stderr.decode("utf-8", "replace")}
    return Trial(Score(n_passed / n if tests.partial else 0.0, details), run.end)


@dataclass(frozen=True, slots=True)
class _Run:
    """The run of one test: why it failed, its end, the end of its standard error, its output for a checker.

    `overran`: it was not run, as the time of all tests was over.
    """

    failure: str
    end: ProcessEnd
    stderr: bytes
    output: str = ""
    overran: bool = False


async def _runs(
    runner: CaseRunner, tests: HiddenTests, program: str, timeout_s: float, conditions: Conditions
) -> list[_Run]:
    """Run the tests until `timeout_s` have passed; `conditions` are those of all of them."""
    result: list[_Run] = []
    began = time.monotonic()
    for test in tests.tests:
        if (spent_s := time.monotonic() - began) > timeout_s:
            why = f"{len(result)} of {len(tests.tests)} tests took {spent_s:.0f} s, more than limits.eval_s has for all"
            end = ProcessEnd(None, timed_out=True, limit_s=timeout_s, conditions=conditions)
            result.append(_Run(why, end, b"", overran=True))
            break
        try:
            ran, end = await runner.run(program, test)
        except ToolError as error:
            if not result:
                raise
            # the first run has shown that files can be written here: what has changed, the program did
            result.append(_Run(f"it left a sandbox in which no program can be written: {error}", result[-1].end, b""))
            break
        output = (output_of(ran) or "") if tests.compare == "checker" else ""
        result.append(_Run(_failure(ran, test, tests), end, ran.stderr[-_SHOWN:], output))
        if result[-1].failure and (not tests.partial or left_behind(ran)):
            break
    return result


def _failure(result: ExecResult, test: StreamTest | CallTest, tests: HiddenTests) -> str:
    """Return why a run does not pass its test; empty if it passes, or is for the checker to say."""
    if result.timed_out:
        return "out of time"
    if result.code == LEFT_BEHIND:
        return "its processes could not be ended"
    if result.code != 0:
        return result.limit or f"exit code {result.code}"
    output = output_of(result)
    if output is None:
        return "too much output"
    if isinstance(test, StreamTest):
        return "" if tests.compare == "checker" or same_output(output, test.expected, tests.compare) else "wrong output"
    try:
        value = value_of(result)
    except NotData as error:
        return str(error)
    eps = tolerance_of(tests.compare)
    return "" if any(same_value(value, expected, eps) for expected in test.expected) else "wrong value"


async def _checked(fresh: FreshSandbox, tests: HiddenTests, runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs, those as failed whose output the row's checker does not accept."""
    result = []
    async with fresh() as sandbox:
        runner = CaseRunner(sandbox, tests)
        for run, test in zip(runs, tests.tests, strict=False):
            assert isinstance(test, StreamTest)
            if run.failure or (refused := await _refused(runner, tests.checker, test, run.output)) is None:
                result.append(run)
                continue
            failed = replace(run, failure="the checker does not accept the output")
            result.append(replace(failed, end=refused) if refused.conditions.shortage else failed)
    return result


async def _refused(runner: CaseRunner, checker: str, test: StreamTest, output: str) -> ProcessEnd | None:
    """Return the end of the checker if it does not accept an output, else None.

    Raises EvaluatorError if it does not accept the expected output either.
    """
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

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.evaluators.program_values import NotData, packed, unpacked
from workers.evaluators.programs import SOLUTION, ProgramEvaluator
from workers.plugins.interfaces import ExecResult, Sandbox, Score, Submission
from workers.testing import FakeSandbox

PROGRAM = ProgramEvaluator("def f():\n    'Two.'\n", "def check(c):\n    assert c() == 2\n", "f")
SUBMISSION = Submission(files={SOLUTION: "def f(): return 2"})
END = {"code": 0, "timed_out": False, "cpu_s": 0.1, "waited_s": 0.0}


def report(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the report of a judge whose canaries end as they must: the first passes, the second fails."""
    canaries = dict(zip(job["canaries"], (True, False), strict=True))
    return {"nonce": job["nonce"], "passed": True, "error": "", "canaries": canaries, "end": END, **changes}


def printed(data: Any, code: int | None = 0) -> ExecResult:
    return ExecResult(code, b"noise\n" + json.dumps(data).encode() + b"\n", b"")


def evaluate(sandbox: FakeSandbox, submission: Submission = SUBMISSION) -> Score:
    @asynccontextmanager
    async def fresh(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        yield sandbox

    return asyncio.run(PROGRAM.evaluate(submission, fresh, 100.0))


def judged(make: Callable[[dict[str, Any]], ExecResult]) -> Score:
    def run(argv: Sequence[str], stdin: bytes) -> ExecResult:
        job = json.loads(stdin)
        # the control always passes
        return printed(report(job)) if job["solution"] != SUBMISSION.files[SOLUTION] else make(job)

    return evaluate(FakeSandbox(commands=run))


def test_report_of_this_run_with_its_canaries_is_success() -> None:
    score = judged(lambda job: printed(report(job)))
    assert (score.value, score.details["passed"]) == (1.0, True)


def test_failed_checks_score_zero_with_a_reason() -> None:
    score = judged(lambda job: printed(report(job, passed=False, error="AssertionError: ")))
    assert (score.value, score.details["reason"]) == (0.0, "AssertionError: ")


@pytest.mark.parametrize("passes", [(True, True), (False, False), (False, True)])
def test_canaries_with_unexpected_ends_are_tampering(passes: tuple[bool, bool]) -> None:
    score = judged(lambda job: printed(report(job, canaries=dict(zip(job["canaries"], passes, strict=True)))))
    assert (score.value, score.details["tampered"]) == (0.0, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda job: ExecResult(0, b"", b""),
        lambda job: ExecResult(0, b"passed\n", b""),
        lambda job: ExecResult(0, job["nonce"].encode(), b""),
        lambda job: printed(report(job, nonce="0" * 32)),
        lambda job: printed({"nonce": job["nonce"], "passed": True}),
        lambda job: printed(report(job, passed=1)),
        lambda job: printed(report(job, canaries={})),
        lambda job: printed(report(job, canaries=dict.fromkeys(("check_a", "check_b"), True))),
        lambda job: printed(report(job), code=1),
        lambda job: printed([report(job)]),
    ],
)
def test_any_other_report_scores_zero(make: Callable[[dict[str, Any]], ExecResult]) -> None:
    assert judged(make).value == 0.0


def test_sandbox_that_cannot_run_the_judge_is_an_error() -> None:
    with pytest.raises(EvaluatorError, match="no python3"):
        evaluate(FakeSandbox(commands=lambda argv, stdin: ExecResult(127, b"", b"no python3")))


@pytest.mark.parametrize("files", [{}, {SOLUTION: " \n"}])
def test_missing_program_scores_zero(files: dict[str, str]) -> None:
    sandbox = FakeSandbox()
    assert evaluate(sandbox, Submission(files=files)).value == 0.0
    assert sandbox.ran == []


class Text(str):
    pass


@pytest.mark.parametrize("value", [1, True, None, 2.5, 1j, "a", b"a", [1, (2,)], {"a": {3}}, {(1, 2): frozenset([4])}])
def test_values_are_transferred_unchanged(value: Any) -> None:
    arrived = unpacked(json.loads(json.dumps(packed(value))))
    assert (arrived, type(arrived)) == (value, type(value))


def test_subclasses_are_transferred_as_plain_values() -> None:
    assert type(unpacked(packed(Text("a")))) is str


@pytest.mark.parametrize("value", [object(), len, iter([]), [object()], {1: len}])
def test_unsupported_types_are_refused(value: Any) -> None:
    with pytest.raises(NotData):
        packed(value)


@pytest.mark.parametrize(
    "data", [1, "a", [], ["i"], ["i", 1], ["o", "x"], ["l", 1], ["d", [[1]]], ["e", [["l", []]]], ["s", 1], {"i": "1"}]
)
def test_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises(NotData):
        unpacked(data)

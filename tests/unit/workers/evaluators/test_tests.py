from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.evaluators.patches import PATCH, REJECTED, patch_files, patch_of, touched
from workers.evaluators.programs import SOLUTION, ProgramEvaluator
from workers.evaluators.tests import Outcomes, PytestEvaluator, TestPlan
from workers.interfaces import Evaluator, ExecResult, Sandbox, Score, Submission
from workers.testing import FakeSandbox
from workers.testing.fakes import Commands

TEST_PATCH = "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a\n+b\n"
PLAN = TestPlan("pytest -q", "/workspace", "src", TEST_PATCH, ["t.py::mend"], ["t.py::keep"])


def evaluate(evaluator: Evaluator, submission: Submission, sandbox: FakeSandbox) -> Score:
    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        yield sandbox

    return asyncio.run(evaluator.evaluate(submission, fresh, 100.0))


def outcome(node_id: str, *outcomes: str) -> str:
    phases = zip(("setup", "call", "teardown"), outcomes, strict=False)
    return "".join(json.dumps([node_id, phase, result]) + "\n" for phase, result in phases)


class Tree:
    """A sandbox in which git works and the tests end as told."""

    def __init__(self, outcomes: str = "", tests: ExecResult | None = None, **broken: ExecResult) -> None:
        self.sandbox = FakeSandbox(commands=self._command)
        self._outcomes = outcomes
        self._tests = tests or ExecResult(0, b"", b"")
        self._broken = broken

    def _command(self, argv: Sequence[str], stdin: bytes) -> ExecResult:
        script = argv[-1]
        for word, result in self._broken.items():
            if word in script:
                return result
        if script == PLAN.command:
            (path,) = [name for name in self.sandbox.files if name.endswith(".jsonl")]
            self.sandbox.files[path] = self._outcomes.encode()
            return self._tests
        return ExecResult(0, b"", b"")


PASSED = outcome("t.py::mend", "passed", "passed", "passed") + outcome("t.py::keep", "passed", "passed", "passed")
PATCHED = Submission(files={PATCH: "diff"})


def test_all_tests_pass() -> None:
    assert evaluate(PytestEvaluator(PLAN), PATCHED, Tree(PASSED).sandbox).value == 1.0


@pytest.mark.parametrize(
    ("outcomes", "unmended", "broken"),
    [
        ("", ["t.py::mend"], ["t.py::keep"]),
        (outcome("t.py::keep", "passed", "passed", "passed"), ["t.py::mend"], []),
        (PASSED + outcome("t.py::keep", "failed"), [], ["t.py::keep"]),
        (outcome("t.py::mend", "passed", "skipped", "passed") + PASSED[200:], ["t.py::mend"], ["t.py::keep"]),
    ],
)
def test_what_failed_is_listed(outcomes: str, unmended: list[str], broken: list[str]) -> None:
    score = evaluate(PytestEvaluator(PLAN), PATCHED, Tree(outcomes).sandbox)
    assert score.value == 0.0
    assert (score.details["unmended"], score.details["broken"]) == (unmended, broken)


def test_tests_out_of_time_are_the_policys_doing() -> None:
    tree = Tree(PASSED, ExecResult(None, b"", b"", timed_out=True))
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score.value == 0.0
    assert score.details["timed_out"] is True


@pytest.mark.parametrize(("code", "what"), [(3, "git is missing"), (4, "pytest is missing")])
def test_missing_tools_are_an_error(code: int, what: str) -> None:
    tree = Tree(PASSED, **{"command -v": ExecResult(code, b"", b"not found")})
    with pytest.raises(EvaluatorError, match=f"sandbox fake: {what}"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


def test_tests_that_do_not_apply_are_an_error() -> None:
    failed = ExecResult(1, b"", b"error: patch failed")
    tree = Tree(PASSED, **{"test.patch": failed})
    with pytest.raises(EvaluatorError, match="the test patch does not apply: error: patch failed"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


def test_a_patch_that_does_not_apply_is_worth_zero() -> None:
    tree = Tree(PASSED, **{"model.patch": ExecResult(1, b"", b"error: corrupt patch")})
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score == Score(0.0, {"reason": "the patch does not apply: error: corrupt patch"})


def test_a_rejected_submission_needs_no_sandbox() -> None:
    sandbox = FakeSandbox()
    score = evaluate(PytestEvaluator(PLAN), Submission(files={REJECTED: "too large"}), sandbox)
    assert score == Score(0.0, {"reason": "too large"})
    assert sandbox.ran == []


def test_torn_lines_are_left_out() -> None:
    outcomes = Outcomes.parse((PASSED + '["t.py::x", "ca').encode())
    assert [outcomes.passed(f"t.py::{name}") for name in ("mend", "keep", "x")] == [True, True, False]


@pytest.mark.parametrize(
    ("listed", "passes"),
    [
        ("base.py::Base::test_a[x::y]", True),  # inherited, listed under the class that defines it
        ("t.py::TestB::test_b", False),  # reported, so nothing else counts
        ("base.py::Base::test_b", False),  # one of two of that name failed
        ("base.py::Base::test_a", False),  # no such parameters
        ("base.py::Base::test_never", False),
    ],
)
def test_an_id_that_is_not_reported_means_every_test_of_its_name(listed: str, passes: bool) -> None:
    ran = {"t.py::TestA::test_a[x::y]", "t.py::TestA::test_b", "t.py::TestB::test_b"}
    assert Outcomes(ran, ran - {"t.py::TestB::test_b"}).passed(listed) is passes


def test_touched_paths() -> None:
    assert touched(TEST_PATCH + "--- /dev/null\n+++ b/new file.py\n") == ["tests/test_x.py", "new file.py"]


@pytest.mark.parametrize("patch", [b"plain", "ü".encode(), b"latin \xfc", b""])
def test_patches_survive_any_encoding(patch: bytes) -> None:
    files = Submission(files=patch_files(patch)).model_dump_json()
    assert patch_of(Submission.model_validate_json(files).files) == patch


PROGRAM = ProgramEvaluator("def f():\n    'Two.'\n", "def check(c):\n    assert c() == 2\n", "f")


def printing(make: Any) -> Commands:
    return lambda argv, stdin: make(stdin.decode().strip())


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda nonce: ExecResult(0, f"noise\n{nonce}\n".encode(), b""), 1.0),
        (lambda nonce: ExecResult(0, b"", b""), 0.0),
        (lambda nonce: ExecResult(0, b"passed\n", b""), 0.0),
        (lambda nonce: ExecResult(1, f"{nonce}\n".encode(), b""), 0.0),
        (lambda nonce: ExecResult(None, f"{nonce}\n".encode(), b"", timed_out=True), 0.0),
    ],
)
def test_only_the_nonce_is_success(make: Any, value: float) -> None:
    submission = Submission(files={SOLUTION: "def f(): return 2"})
    score = evaluate(PROGRAM, submission, FakeSandbox(commands=printing(make)))
    assert score.value == value
    assert set(score.details) == {"passed", "exit_code", "timed_out", "last_lines"}


@pytest.mark.parametrize("files", [{}, {SOLUTION: " \n"}])
def test_no_program_is_worth_zero(files: dict[str, str]) -> None:
    sandbox = FakeSandbox()
    assert evaluate(PROGRAM, Submission(files=files), sandbox).value == 0.0
    assert sandbox.ran == []

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from farm.errors import EvaluatorError
from workers.evaluators.outcomes import Outcomes
from workers.evaluators.patches import PATCH, REJECTED, patch_files, patch_of, touched
from workers.evaluators.tests import PytestEvaluator, TestPlan
from workers.plugins.interfaces import Evaluator, ExecResult, Sandbox, Score, Submission
from workers.testing import FakeSandbox

TEST_PATCH = "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a\n+b\n"
PLAN = TestPlan("pytest -q", "/workspace", "src", TEST_PATCH, ["t.py::fix"], ["t.py::keep"])


def evaluate(evaluator: Evaluator, submission: Submission, sandbox: FakeSandbox) -> Score:
    @asynccontextmanager
    async def fresh(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        yield sandbox

    return asyncio.run(evaluator.evaluate(submission, fresh, 100.0))


Record = list[str]
CANARIES = {"t.py": {"test_c": "failed", "test_d": "passed", "test_e": "skipped", "test_f": "absent"}}
BEHAVING = [
    *(["t.py::test_c", "setup", "passed"], ["t.py::test_c", "call", "failed"], ["t.py::test_d", "call", "passed"]),
    ["t.py::test_e", "call", "skipped"],
]


def outcome(node_id: str, *outcomes: str) -> list[Record]:
    phases = zip(("setup", "call", "teardown"), outcomes, strict=False)
    return [[node_id, phase, result] for phase, result in phases]


def signed(records: Sequence[Record], key: bytes) -> bytes:
    signer = hmac.new(key, digestmod="sha256")
    lines = []
    for record in records:
        line = json.dumps(record).encode()
        signer.update(line)
        lines.append(signer.hexdigest().encode() + b" " + line + b"\n")
    return b"".join(lines)


class Tree:
    """A sandbox in which git works and the tests end as set; `clean` is their result for the tree without a patch."""

    def __init__(
        self,
        outcomes: Sequence[Record] = (),
        clean: Sequence[Record] = (),
        end: Mapping[str, Any] = MappingProxyType({}),
        broken: Mapping[str, ExecResult] = MappingProxyType({}),
        copies: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        without_copies: Sequence[Record] = (),
    ) -> None:
        self.sandbox = FakeSandbox(commands=self._command)
        self.n_runs = 0
        self._outcomes = outcomes
        self._clean = clean
        self._end = end
        self._broken = broken
        self._copies = copies
        self._without_copies = without_copies
        self._has_copies = False
        self._patched = False

    def _command(self, argv: Sequence[str], stdin: bytes) -> ExecResult:
        script = argv[-1]
        for word, result in self._broken.items():
            if word in script:
                return result
        if "class CanaryNames" in script:
            self._has_copies = bool(json.loads(stdin)["copied"])
            copies = {path: dict(tests) for path, tests in self._copies.items()} if self._has_copies else {}
            return answer({"canaries": CANARIES, "copies": copies, "uncopied": {"t.py::keep": "it is a generator"}})
        if "class TreeGuard" in script:
            self._patched = self._patched and json.loads(stdin)["do"] != "survey"
            return answer({"names": [], "plugins": ["timeout"], "missing": "", "restored": []})
        if "model.patch" in script and "git apply --whitespace" in script:
            self._patched = True
        if "class ObservedRun" in script:
            self.n_runs += 1
            return self._run(json.loads(stdin)["key"].encode())
        return ExecResult(0, b"", b"")

    def _run(self, key: bytes) -> ExecResult:
        records = self._outcomes if self._patched else self._clean
        if self._patched and self._without_copies and not self._has_copies:
            records = self._without_copies
        result = {"code": 0, "timed_out": False, "cpu_s": 1.0, "late_s": 0.0, "wall_s": 1.0, **self._end}
        data = {"records": signed(records, key), "output": b"said"}
        return answer({**result, **{name: base64.b64encode(text).decode() for name, text in data.items()}})


def answer(value: Any) -> ExecResult:
    return ExecResult(0, json.dumps(value).encode(), b"")


DONE = ("passed", "passed", "passed")
PASSED = outcome("t.py::fix", *DONE) + outcome("t.py::keep", *DONE) + BEHAVING
PATCHED = Submission(files={PATCH: "diff"})


def test_all_tests_passing_scores_one() -> None:
    assert evaluate(PytestEvaluator(PLAN), PATCHED, Tree(PASSED).sandbox).value == 1.0


@pytest.mark.parametrize(
    ("outcomes", "still_failing", "broken"),
    [
        ([], ["t.py::fix"], ["t.py::keep"]),
        (outcome("t.py::keep", *DONE), ["t.py::fix"], []),
        (PASSED + outcome("t.py::keep", "failed"), [], ["t.py::keep"]),
        (outcome("t.py::fix", "passed", "skipped", "passed"), ["t.py::fix"], ["t.py::keep"]),
    ],
)
def test_failed_tests_are_listed(outcomes: list[Record], still_failing: list[str], broken: list[str]) -> None:
    score = evaluate(PytestEvaluator(PLAN), PATCHED, Tree(outcomes, clean=BEHAVING).sandbox)
    assert score.value == 0.0
    assert (score.details["unmended"], score.details["broken"]) == (still_failing, broken)


def test_tests_that_time_out_are_the_policys_fault() -> None:
    tree = Tree(PASSED, end={"code": -9, "timed_out": True, "wall_s": 90.0})
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score.value == 0.0
    assert (score.details["timed_out"], tree.n_runs) == (True, 1)


def test_time_limit_passed_while_the_sandbox_was_suspended_is_an_error() -> None:
    tree = Tree(end={"code": -9, "timed_out": True, "wall_s": 90.0, "late_s": 60.0})
    with pytest.raises(EvaluatorError, match=r"the machine was late by 60\.0 s"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


@pytest.mark.parametrize("end", [{"code": -9}, {"code": 137}])
def test_tests_killed_before_and_after_a_clean_tree_are_the_policys_fault(end: dict[str, Any]) -> None:
    tree = Tree(end=end, clean=BEHAVING)
    assert evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox).value == 0.0
    assert tree.n_runs == 3


def test_killed_reader_is_an_error_if_the_clean_tree_is_killed_too() -> None:
    tree = Tree(broken={"class ObservedRun": ExecResult(137, b"", b"Killed")})
    with pytest.raises(EvaluatorError, match="the tests of the clean tree did not run: Killed"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


@pytest.mark.parametrize("gold", ["", "diff"])
def test_run_without_a_pass_is_an_error_if_a_control_has_none_either(gold: str) -> None:
    for outcomes in ([], outcome("t.py::fix", "failed"), outcome("t.py::fix", "skipped")):
        tree = Tree(outcomes, clean=outcomes)
        plan = replace(PLAN, command=f"pytest {uuid.uuid4()}", gold=gold)
        with pytest.raises(EvaluatorError, match="a control that must pass did not: no test was reported as passed"):
            evaluate(PytestEvaluator(plan), PATCHED, tree.sandbox)
        assert tree.n_runs == 2


def test_control_runs_once_in_ten_minutes_per_instance_and_only_if_nothing_passed() -> None:
    plan = replace(PLAN, command=f"pytest {uuid.uuid4()}")
    tree = Tree(outcome("t.py::keep", *DONE), clean=BEHAVING)
    assert (evaluate(PytestEvaluator(plan), PATCHED, tree.sandbox).value, tree.n_runs) == (0.0, 1)
    tree = Tree([], clean=BEHAVING)
    assert [evaluate(PytestEvaluator(plan), PATCHED, tree.sandbox).value for _ in range(3)] == [0.0] * 3
    assert tree.n_runs == 4


def test_control_runs_in_a_sandbox_without_the_patch() -> None:
    plan = replace(PLAN, command=f"pytest {uuid.uuid4()}")
    clean = Tree(clean=BEHAVING)

    @asynccontextmanager
    async def of_the_control(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        yield clean.sandbox

    tree = Tree([])
    assert evaluate(PytestEvaluator(plan, of_the_control), PATCHED, tree.sandbox).value == 0.0
    assert (tree.n_runs, clean.n_runs) == (1, 1)


def without(name: str) -> list[Record]:
    return [record for record in PASSED if not record[0].endswith(name)]


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([*without("test_c"), ["t.py::test_c", "call", "passed"]], "t.py::test_c passed, and must be failed"),
        ([*PASSED, ["t.py::test_d", "teardown", "failed"]], "t.py::test_d failed, and must be passed"),
        ([*without("test_e"), ["t.py::test_e", "call", "passed"]], "t.py::test_e passed, and must be skipped"),
        ([*PASSED, ["t.py::test_f", "call", "passed"]], "t.py::test_f passed, and must be absent"),
        (without("test_c"), "t.py::test_c absent, and must be failed"),
        ([record for record in PASSED if "test_" not in record[0]], "t.py::test_c absent"),
    ],
)
def test_misbehaving_canary_scores_zero(outcomes: list[Record], reason: str) -> None:
    score = evaluate(PytestEvaluator(PLAN), PATCHED, Tree(outcomes, clean=BEHAVING).sandbox)
    assert score.value == 0.0
    assert reason in score.details["tampered"]


COPIES = {"t.py": {"copied": "fix"}}
COPY_FAILED = outcome("t.py::copied", "passed", "failed", "passed")
COPY_PASSED = outcome("t.py::copied", *DONE)


@pytest.mark.parametrize(
    ("copy", "clean", "value"),
    [
        (COPY_FAILED, [], 1.0),
        ([], [], 1.0),  # none is reported, as its parameters differ: it shows nothing
        (outcome("t.py::copied", "skipped"), [], 1.0),
        (COPY_PASSED, [], 0.0),
        (COPY_PASSED, COPY_FAILED, 0.0),
        (COPY_PASSED, COPY_PASSED, 1.0),  # over the clean tree, too: its surroundings hide failures
        (outcome("t.py::copied[a]", *DONE), [], 1.0),  # of no test that passed
    ],
)
def test_copy_that_passes_next_to_its_test_scores_zero(copy: list[Record], clean: list[Record], value: float) -> None:
    tree = Tree(PASSED + copy, clean=BEHAVING + clean, copies=COPIES)
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score.value == value
    assert ("a copy of t.py::fix passed" in score.details.get("tampered", "")) is (value == 0.0)


def test_details_count_tests_without_a_copy_and_their_reasons() -> None:
    plan = replace(PLAN, pass_to_pass=["t.py::keep", *(f"t.py::other[{number}]" for number in range(3))])
    others = [record for number in range(3) for record in outcome(f"t.py::other[{number}]", *DONE)]
    tree = Tree(PASSED + others + COPY_FAILED, copies=COPIES)
    details = evaluate(PytestEvaluator(plan), PATCHED, tree.sandbox).details
    assert details["n_copies"] == [1, 1]
    assert details["uncopied"] == {"it is a generator": 1, "it was not chosen, or its file cannot have copies": 1}


@pytest.mark.parametrize(
    ("before", "after", "n_runs", "value"),
    [
        # a test that must pass fails after a copy: run again without copies
        (outcome("t.py::fix", *DONE), outcome("t.py::keep", "passed", "failed", "passed"), 2, 1.0),
        # one fails before it, or one before and one after it: the copy is not the cause
        (outcome("t.py::keep", "passed", "failed", "passed"), outcome("t.py::fix", *DONE), 1, 0.0),
        (outcome("t.py::keep", "passed", "failed"), outcome("t.py::fix", "passed", "failed"), 1, 0.0),
        # it does not run with the copies
        (outcome("t.py::fix", *DONE), [], 2, 1.0),
    ],
)
def test_patch_that_fails_by_tests_after_a_copy_is_run_again_without_copies(
    before: list[Record], after: list[Record], n_runs: int, value: float
) -> None:
    tree = Tree(before + COPY_FAILED + after + BEHAVING, copies=COPIES, without_copies=PASSED)
    assert evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox).value == value
    assert tree.n_runs == n_runs


def test_command_that_omits_canaries_of_a_clean_tree_is_an_error() -> None:
    tree = Tree(without("test_c"), clean=outcome("t.py::keep", *DONE))
    with pytest.raises(EvaluatorError, match="does not work with canaries"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


def test_uncollectable_tests_of_a_clean_tree_excuse_nothing() -> None:
    score = evaluate(PytestEvaluator(PLAN), PATCHED, Tree(without("test_c"), clean=[]).sandbox)
    assert score.value == 0.0
    assert score.details["tampered"]


def test_disk_that_is_full_only_with_the_patch_scores_zero() -> None:
    full = ExecResult(1, b"", b"error: unable to write file x: No space left on device")
    tree = Tree(clean=BEHAVING, broken={'nowarn "$FOLDER/model.patch"': full})
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score.value == 0.0


def test_disk_that_is_full_with_a_clean_tree_is_an_error() -> None:
    full = ExecResult(1, b"", b"error: unable to write file x: No space left on device")
    with pytest.raises(EvaluatorError, match="no space was left for the patch, and a control"):
        evaluate(PytestEvaluator(PLAN), PATCHED, Tree(broken={"git apply": full}).sandbox)


@pytest.mark.parametrize("what", ["git is missing", "pytest is missing from the environment"])
def test_missing_tools_are_an_error(what: str) -> None:
    seen = answer({"names": [], "plugins": [], "missing": what})
    tree = Tree(PASSED, broken={"class TreeGuard": seen})
    with pytest.raises(EvaluatorError, match=f"sandbox fake: {what}; fix its image"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


def test_missing_python_is_an_error() -> None:
    absent = ExecResult(127, b"", b"python: command not found")
    with pytest.raises(EvaluatorError, match="cannot see what the environment holds: python: command not found"):
        evaluate(PytestEvaluator(PLAN), PATCHED, Tree(broken={"class TreeGuard": absent}).sandbox)


def test_test_patch_that_does_not_apply_to_a_clean_tree_is_an_error() -> None:
    failed = ExecResult(1, b"", b"error: patch failed")
    tree = Tree(PASSED, broken={"test.patch": failed})
    with pytest.raises(EvaluatorError, match="the test patch does not apply: error: patch failed"):
        evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)


def test_patch_that_does_not_apply_scores_zero() -> None:
    tree = Tree(PASSED, broken={"model.patch": ExecResult(1, b"", b"error: corrupt patch")})
    score = evaluate(PytestEvaluator(PLAN), PATCHED, tree.sandbox)
    assert score == Score(0.0, {"reason": "the patch does not apply: error: corrupt patch"})


def test_rejected_submission_needs_no_sandbox() -> None:
    sandbox = FakeSandbox()
    score = evaluate(PytestEvaluator(PLAN), Submission(files={REJECTED: "too large"}), sandbox)
    assert score == Score(0.0, {"reason": "too large"})
    assert sandbox.ran == []


KEY = b"key"


def test_torn_lines_are_ignored() -> None:
    outcomes = Outcomes.parse(signed(PASSED, KEY) + b'0f ["t.py::x", "ca', KEY)
    assert [outcomes.passed(f"t.py::{name}") for name in ("fix", "keep", "x")] == [True, True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines, lines[0]],  # repeated
        lambda lines: [lines[1], lines[0], *lines[2:]],  # in another order
        lambda lines: lines[1:],  # left out
        lambda lines: [*lines[:2], b"0" * 64 + b' ["t.py::fix", "call", "passed"]', *lines[2:]],
        lambda lines: [*lines[:2], b"rubbish", *lines[2:]],
        lambda lines: [*lines[:2], b"", *lines[2:]],
        lambda lines: [line.replace(b"passed", b"failed") for line in lines],
        lambda lines: [line.replace(b"call", b"c\xffll") for line in lines],
    ],
)
def test_forged_lines_make_no_test_pass(change: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = change(signed(PASSED, KEY).splitlines())
    outcomes = Outcomes.parse(b"\n".join(lines) + b"\n", KEY)
    assert outcomes.forged
    assert not any(outcomes.passed(f"t.py::{name}") for name in ("fix", "keep"))


def test_lines_signed_with_another_key_make_no_test_pass() -> None:
    assert Outcomes.parse(signed(PASSED, b"other"), KEY).forged


@pytest.mark.parametrize(
    ("listed", "passes"),
    [
        ("base.py::Base::test_a[x::y]", True),  # inherited, listed under the class that defines it
        ("t.py::TestB::test_b", False),  # reported, so no other test counts
        ("base.py::Base::test_b", False),  # one of two of that name failed
        ("base.py::Base::test_a", False),  # no such parameters
        ("base.py::Base::test_never", False),
    ],
)
def test_unreported_id_matches_every_test_of_its_name(listed: str, passes: bool) -> None:
    ran = {"t.py::TestA::test_a[x::y]", "t.py::TestA::test_b", "t.py::TestB::test_b"}
    assert Outcomes(ran, ran - {"t.py::TestB::test_b"}).passed(listed) is passes


@pytest.mark.parametrize(
    ("listed", "passes"),
    [
        ("t.py::test_many[the", True),  # cut at a space: both passed
        ("t.py::test_many[a", False),  # one of two failed
        ("t.py::test_many[", False),
        ("t.py::test_many[x]", True),  # cut after a bracket that is a part of the parameter
        ("t.py::TestA::test_in_class[one", True),
        ("base.py::Base::test_in_class[one", True),  # inherited, and cut
        ("t.py::test_many[no", False),  # there is no such test
        ("t.py::test_man", False),  # only parameters are cut
        ("t.py::test_path[/last.py]", True),  # the last part of a path is listed
        ("t.py::test_path[/other.py]", False),
        ("t.py::test_set_aside[a", True),  # one passed, the others are skipped or expected to fail by their marks
        ("t.py::test_set_aside[b", False),  # no test passed
    ],
)
def test_cut_id_matches_every_test_with_that_prefix(listed: str, passes: bool) -> None:
    passed = [
        *("test_many[the one]", "test_many[the other]", "test_many[a b]", "test_many[x] y]"),
        *("TestA::test_in_class[one two]", "test_path[/tmp/last.py]", "test_set_aside[a 1]"),
    ]
    failed = ["test_many[a c]", "test_path[/tmp/other.py]"]
    skipped, xfailed = ["test_set_aside[a 2]", "test_set_aside[b 1]"], ["test_set_aside[a 3]", "test_set_aside[b 2]"]
    records = [
        *(record for test in passed for record in outcome(f"t.py::{test}", *DONE)),
        *(record for test in failed for record in outcome(f"t.py::{test}", "passed", "failed", "passed")),
        *(record for test in skipped for record in outcome(f"t.py::{test}", "skipped")),
        *(record for test in xfailed for record in outcome(f"t.py::{test}", "passed", "skipped", "passed")),
        *([f"t.py::{test}", "call", "xfailed"] for test in xfailed),
    ]
    assert Outcomes.parse(signed(records, KEY), KEY).passed(listed) is passes


@pytest.mark.parametrize(("may_xfail", "value"), [((), 0.0), (("t.py::fix",), 1.0)])
def test_expected_failure_counts_as_a_pass_where_allowed(may_xfail: Sequence[str], value: float) -> None:
    records = [*outcome("t.py::fix", "passed", "skipped", "passed"), ["t.py::fix", "call", "xfailed"]]
    plan = replace(PLAN, may_xfail=may_xfail)
    tree = Tree(records + outcome("t.py::keep", *DONE) + BEHAVING)
    assert evaluate(PytestEvaluator(plan), PATCHED, tree.sandbox).value == value


def test_touched_paths() -> None:
    assert touched(TEST_PATCH + "--- /dev/null\n+++ b/new file.py\n") == ["tests/test_x.py", "new file.py"]


@pytest.mark.parametrize("patch", [b"plain", "ü".encode(), b"latin \xfc", b""])
def test_patches_in_any_encoding_are_preserved(patch: bytes) -> None:
    files = Submission(files=patch_files(patch)).model_dump_json()
    assert patch_of(Submission.model_validate_json(files).files) == patch

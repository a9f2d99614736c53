"""Scores a patch by the tests of its issue, run by pytest in a sandbox that the policy never touched.

The verdict is read from our own pytest plugin, never from printed text. Whether git and pytest are there is checked
before the patch is applied, so what breaks after it is the policy's doing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar

from farm.errors import EvaluatorError, ToolError
from workers.evaluators.patches import GIT_ENV, REJECTED, PatchedTree, patch_of
from workers.evaluators.programs import ending
from workers.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

_FOLDER = "/tmp/farm-tests"  # noqa: S108  (of the sandbox, which nobody shares)
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class TestPlan:
    """How an issue is tested: `command` runs in `tree`, `pythonpath` is relative to it; ids are pytest node ids."""

    __test__: ClassVar[bool] = False

    command: str
    tree: str
    pythonpath: str
    test_patch: str
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]


class PytestEvaluator:
    """1.0 if every test that the fix must mend and every test that it must not break passes, else 0.0."""

    name: ClassVar[str] = "pytest"

    def __init__(self, plan: TestPlan) -> None:
        self._plan = plan

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Tests that run out of time are 0.0. Raises EvaluatorError if git or pytest is missing or our patch fails."""
        if REJECTED in submission.files:
            return Score(0.0, {"reason": submission.files[REJECTED]})
        started = time.monotonic()
        async with fresh() as sandbox:
            await self._check_tools(sandbox)
            tree = PatchedTree(sandbox, self._plan.tree, _FOLDER, timeout_s / 4)
            await tree.baseline()
            refused = await tree.apply_policy(patch_of(submission.files))
            if refused:
                return Score(0.0, {"reason": f"the patch does not apply: {refused}"})
            await tree.apply_tests(self._plan.test_patch)
            # A tenth is kept back, so that a test that hangs is found here and not by the stage's own clock.
            left_s = timeout_s * 0.9 - (time.monotonic() - started)
            if left_s <= 0:
                raise EvaluatorError(f"sandbox {sandbox.sandbox_id}: no time is left for the tests of {timeout_s} s")
            return await self._test(sandbox, left_s)

    async def _check_tools(self, sandbox: Sandbox) -> None:
        script = "command -v git >/dev/null || exit 3; python -c 'import pytest' || exit 4"
        result = await sandbox.exec(["bash", "-c", script], timeout_s=60.0, cwd="/")
        missing = {0: "", 3: "git is missing", 4: "pytest is missing from the environment"}.get(result.code or 0, "")
        if missing or result.code != 0:
            raise EvaluatorError(
                f"sandbox {sandbox.sandbox_id}: {missing or 'its tools cannot be checked'}; mend its image: "
                f"{ending(result)}"
            )

    async def _test(self, sandbox: Sandbox, left_s: float) -> Score:
        plugin = f"farm_outcomes_{secrets.token_hex(4)}"
        outcomes = f"{_FOLDER}/{secrets.token_hex(8)}.jsonl"
        source = files("workers.evaluators").joinpath("outcomes_plugin.py").read_bytes()
        await sandbox.write_file(f"{_FOLDER}/plugin/{plugin}.py", source)
        await sandbox.write_file(outcomes, b"")
        env = {
            **GIT_ENV,
            "PYTHONPATH": f"{_FOLDER}/plugin:{self._plan.tree}/{self._plan.pythonpath}",
            "PYTEST_ADDOPTS": f"-p {plugin}",
            "FARM_OUTCOMES": outcomes,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        result = await sandbox.exec(["bash", "-c", self._plan.command], timeout_s=left_s, env=env, cwd=self._plan.tree)
        return self._score(result, Outcomes.parse(await _read(sandbox, outcomes)))

    def _score(self, result: ExecResult, outcomes: Outcomes) -> Score:
        unmended = [test for test in self._plan.fail_to_pass if not outcomes.passed(test)]
        broken = [test for test in self._plan.pass_to_pass if not outcomes.passed(test)]
        success = not unmended and not broken and not result.timed_out
        details = {
            "n_fail_to_pass": [len(self._plan.fail_to_pass) - len(unmended), len(self._plan.fail_to_pass)],
            "n_pass_to_pass": [len(self._plan.pass_to_pass) - len(broken), len(self._plan.pass_to_pass)],
            "unmended": unmended[:_MAX_LISTED],
            "broken": broken[:_MAX_LISTED],
            **ending(result),
        }
        return Score(float(success), details)


async def _read(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await sandbox.read_file(path)
    except ToolError:
        return b""


class Outcomes:
    """Which tests ran and passed, by pytest node id."""

    def __init__(self, ran: Collection[str], passed: Collection[str]) -> None:
        self._passed = frozenset(passed)
        self._ran = frozenset(ran)
        self._by_name: defaultdict[str, set[str]] = defaultdict(set)
        for node_id in self._ran:
            self._by_name[name_of(node_id)].add(node_id)

    @classmethod
    def parse(cls, lines: bytes) -> Outcomes:
        """From the plugin's lines; a test passed if none of its phases failed. A torn last line is left out."""
        called: set[str] = set()
        failed: set[str] = set()
        seen: set[str] = set()
        for line in lines.splitlines():
            try:
                node_id, phase, outcome = json.loads(line)
            except ValueError:
                continue
            seen.add(node_id)
            if outcome == "failed":
                failed.add(node_id)
            elif phase == "call" and outcome == "passed":
                called.add(node_id)
        return cls(seen, called - failed)

    def passed(self, test: str) -> bool:
        """Whether a test of the instance passed.

        Data sets list inherited tests under the file or class that defines them, an id that pytest does not report.
        Such an id means every test of that name and those parameters: all that ran must have passed, and one must.
        """
        if test in self._ran:
            return test in self._passed
        same = self._by_name.get(name_of(test), set())
        return bool(same) and same <= self._passed


def name_of(node_id: str) -> str:
    """The function and its parameters: `a.py::TestB::test_c[x::y]` is `test_c[x::y]`."""
    path, bracket, parameters = node_id.partition("[")
    return path.rpartition("::")[2] + bracket + parameters

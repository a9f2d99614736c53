"""Programs and patches scored in real sandboxes: reference solutions pass, and nothing else does."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from examples.problems import humaneval_problems, swe_problems
from farm.records.request import SandboxSpec
from tests.conftest import absent
from tests.services.soak import ONLY, at_length
from workers.handlers.code import CodeHandler, CodeInstance
from workers.handlers.swe import SweHandler, SweInstance
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission
from workers.plugins.registry import sandbox as provider

FIXES = [SweInstance.model_validate(problem.fields) for problem in swe_problems()]
SWE = FIXES[0]
CODE = [CodeInstance.model_validate(problem.fields) for problem in humaneval_problems(5)]


@pytest.fixture(autouse=True)
def _namespace_sandboxes() -> None:
    missing = provider("namespace").missing()
    if missing:
        absent(missing)


def opening(spec: SandboxSpec | None) -> FreshSandbox:
    assert spec is not None

    @asynccontextmanager
    async def fresh(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        sandbox = await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", spec)
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    def open_one(*_: object, **__: object) -> AbstractAsyncContextManager[Sandbox]:
        return fresh()

    return open_one


def score_program(instance: CodeInstance, text: str, timeout_s: float = 60.0) -> Score:
    handler = CodeHandler(instance)
    submission = Submission(files={"solution.py": text})
    return asyncio.run(handler.evaluator().evaluate(submission, opening(handler.sandbox()), timeout_s))


@pytest.mark.parametrize("instance", CODE, ids=lambda instance: instance.task_id)
def test_reference_programs_pass(instance: CodeInstance) -> None:
    assert score_program(instance, f"{instance.prompt}{instance.canonical_solution}").value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; print(sys.stdin.read()); sys.exit(0)",
        "def has_close_elements(*_): return None",
        "this is no Python",
        "has_close_elements = 3",
    ],
)
def test_wrong_programs_fail(text: str) -> None:
    assert score_program(CODE[0], text).value == 0.0


def test_hanging_program_scores_zero() -> None:
    score = score_program(CODE[0], "while True: pass", timeout_s=40.0)
    assert (score.value, score.details["exit_code"]) == (0.0, -signal.SIGXCPU)


async def scored(edit: str, instance: SweInstance = SWE) -> Score:
    """Play a command in a sandbox as a policy would, collect, and score in another."""
    handler = SweHandler(instance)
    fresh = opening(handler.sandbox())
    async with fresh() as sandbox:
        await handler.prepare(sandbox)
        await sandbox.write_file("/tmp/gold.patch", (instance.patch or "").encode())
        done = await sandbox.exec(["bash", "-c", edit], timeout_s=60.0, cwd="/workspace")
        assert done.code == 0, done
        submission = await handler.collect(sandbox, None)
    return await handler.evaluator().evaluate(submission, fresh, 300.0)


# each has its own packages, whose installation takes longer than its tests
@pytest.mark.soak
@pytest.mark.parametrize("instance", at_length(FIXES[:3:2], FIXES), ids=lambda instance: instance.instance_id)
def test_gold_patch_scores_one(instance: SweInstance) -> None:
    gold = asyncio.run(scored("git apply /tmp/gold.patch", instance))
    assert gold.value == 1.0, gold.details


@pytest.mark.soak
@pytest.mark.parametrize("instance", at_length(FIXES[:1], FIXES), ids=lambda instance: instance.instance_id)
def test_empty_patch_scores_zero(instance: SweInstance) -> None:
    nothing = asyncio.run(scored("true", instance))
    assert nothing.value == 0.0
    assert nothing.details["unmended"]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param("echo '# looked at' >> sqlparse/sql.py", marks=ONLY),
        "printf 'import os\\nos._exit(0)\\n' > conftest.py",
        "printf 'def test_comment_between_cte_clauses_issue632(): pass\\n' > tests/test_regressions.py",
        "rm -rf .git",
    ],
)
def test_unrelated_edit_scores_zero(edit: str) -> None:
    score = asyncio.run(scored(edit))
    assert score.value == 0.0
    assert score.details

"""A small project with a wrong function and its tests, as an instance that is scored in seconds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from farm.records.request import SandboxSpec
from workers.evaluators.patches import GIT_ENV, patch_files
from workers.evaluators.tests import PytestEvaluator, TestPlan
from workers.plugins.interfaces import FreshSandbox, Sandbox, Score, Submission
from workers.plugins.registry import sandbox as provider

TREE = "/workspace"
SPEC = SandboxSpec(packages=("pytest==8.3.5", "pytest-timeout==2.3.1"), workdir=TREE)
CORE = '"""Sums."""\n\n\ndef add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n'
TESTS = """import unittest

import pytest

from calc.core import add, mul


def test_mul_of_numbers():
    assert mul(2, 3) == 6


@pytest.mark.parametrize("a", [1, 2])
def test_mul_by_one(a):
    assert mul(a, 1) == a


class TestSums(unittest.TestCase):
    def test_mul_of_zero(self):
        self.assertEqual(mul(0, 3), 0)
"""
ADDED = """

def test_add_of_numbers():
    assert add(2, 3) == 5


class TestMore(unittest.TestCase):
    def test_add_of_zero(self):
        self.assertEqual(add(0, 3), 3)
"""
FILES = {
    "calc/__init__.py": "from calc.core import add, mul\n",
    "calc/core.py": CORE,
    "tests/test_core.py": TESTS,
    "tests/base.py": "SIX = 6\n",
    "setup.cfg": "[metadata]\nname = calc\n",
    "pyproject.toml": '[project]\nname = "calc"\nversion = "1"\n',
    ".gitignore": "*.log\n",
}
GOLD = "sed -i 's/a - b/a + b/' calc/core.py"


class Project:
    """The tree in a folder of this machine, for making patches."""

    def __init__(self, folder: Path, added: str = ADDED, files: Mapping[str, str] = {}) -> None:
        self._folder = folder
        for path, text in {**FILES, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        self._sh("git init -q . && git add -A -f && git commit -qm base")
        (folder / "tests/test_core.py").write_text(TESTS + added)
        self.test_patch = self._sh("git diff && git checkout -q -f .").decode()

    def patch(self, edit: str) -> bytes:
        """Return the diff that a script of bash makes."""
        self._sh(f"set -e; {edit}")
        return self._sh("git add -A; git diff --cached --binary --no-renames; git reset -q --hard; git clean -qfdx")

    def _sh(self, script: str) -> bytes:
        env = {**GIT_ENV, "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", script], cwd=self._folder, env=env, capture_output=True, check=True)
        return done.stdout

    def plan(
        self, command: str = "python -m pytest -q -p no:cacheprovider --timeout=20 tests/test_core.py"
    ) -> TestPlan:
        file = "tests/test_core.py"
        return TestPlan(
            command=command,
            tree=TREE,
            pythonpath=".",
            test_patch=self.test_patch,
            fail_to_pass=[f"{file}::test_add_of_numbers", f"{file}::TestMore::test_add_of_zero"],
            pass_to_pass=[
                *(f"{file}::{name}" for name in ("test_mul_of_numbers", "TestSums::test_mul_of_zero")),
                *(f"{file}::test_mul_by_one[{a}]" for a in (1, 2)),
            ],
        )


async def _put(sandbox: Sandbox) -> None:
    await sandbox.exec(["bash", "-c", f"rm -rf {TREE}/* {TREE}/.[!.]* /tmp/*"], timeout_s=20, cwd="/")
    for path, text in FILES.items():
        await sandbox.write_file(f"{TREE}/{path}", text.encode())


class Pool:
    """Sandboxes in which many submissions are scored one after the other, each on a fresh tree."""

    def __init__(self, n_sandboxes: int) -> None:
        self._free: asyncio.Queue[Sandbox | None] = asyncio.Queue()
        for _ in range(n_sandboxes):
            self._free.put_nowait(None)
        self._started: list[Sandbox] = []

    def fresh(self, alone: bool = False) -> FreshSandbox:
        """Return sandboxes of the pool; if `alone`, new ones that are then ended."""
        return self._new if alone else self._shared

    @asynccontextmanager
    async def _new(self, *_: object, **__: object) -> AsyncIterator[Sandbox]:
        sandbox = await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", SPEC)
        try:
            await _put(sandbox)
            yield sandbox
        finally:
            await sandbox.stop()

    @asynccontextmanager
    async def _shared(self, *_: object, **__: object) -> AsyncIterator[Sandbox]:
        sandbox = await self._free.get()
        if sandbox is None:
            sandbox = await provider("namespace").start(f"test-{uuid.uuid4().hex[:12]}", SPEC)
            self._started.append(sandbox)
        try:
            await _put(sandbox)
            yield sandbox
        finally:
            self._free.put_nowait(sandbox)

    async def close(self) -> None:
        for sandbox in self._started:
            await sandbox.stop()


async def score(plan: TestPlan, patch: bytes, fresh: FreshSandbox, timeout_s: float = 120.0) -> Score:
    return await PytestEvaluator(plan).evaluate(Submission(files=patch_files(patch)), fresh, timeout_s)

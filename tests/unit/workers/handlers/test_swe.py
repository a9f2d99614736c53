from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from examples.problems import swe_problems
from farm.errors import HandlerError
from farm.records.request import SandboxLimits
from workers.evaluators.patches import GIT_ENV, REJECTED, PatchedTree, patch_of, script
from workers.handlers.swe import SweHandler, SweInstance
from workers.plugins.interfaces import ExecResult, Sandbox, Submission
from workers.testing import FakeSandbox

FIELDS = swe_problems(1)[0].fields
INSTANCE = SweInstance.model_validate(FIELDS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"test_patch": "nothing"}, "must be a unified diff"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"base_sdist": {"name": "x", "version": "1", "sha256": "short"}}, "sha256"),
        ({"environment": {**FIELDS["environment"], "pip": ["pytest>=8"]}}, "packages"),
    ],
)
def test_invalid_fields_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SweInstance.model_validate(FIELDS | change)


def test_sandbox_has_the_base_tree_and_its_packages() -> None:
    spec = SweHandler(INSTANCE).sandbox()
    assert spec is not None
    (archive,) = spec.archives
    assert (archive.sha256, archive.path) == (FIELDS["base_sdist"]["sha256"], "/workspace")
    assert list(spec.packages) == FIELDS["environment"]["pip"]


def test_policy_sees_only_the_issue() -> None:
    for problem in swe_problems():
        instance = SweInstance.model_validate(problem.fields)
        text = json.dumps(SweHandler(instance).messages())
        assert json.dumps(instance.problem_statement)[1:-1] in text
        added = [line[1:].strip() for line in (instance.patch or "").splitlines() if line.startswith("+ ")]
        assert not [line for line in added if len(line) > 30 and line in text]
        assert not [test for test in instance.FAIL_TO_PASS if test in text]


def test_another_python_version_is_refused_without_a_retry() -> None:
    fields = {**FIELDS, "environment": {**FIELDS["environment"], "python": "3.6"}}
    with pytest.raises(HandlerError, match=r"needs Python 3\.6, the farm has 3\.") as refused:
        asyncio.run(SweHandler(SweInstance.model_validate(fields)).prepare(FakeSandbox()))
    assert not refused.value.retryable


def test_tree_that_cannot_be_committed_is_an_error() -> None:
    sandbox = FakeSandbox(commands=lambda argv, stdin: ExecResult(127, b"", b"git: command not found"))
    with pytest.raises(HandlerError, match="command not found"):
        asyncio.run(SweHandler(INSTANCE).prepare(sandbox))


def collect(commands: Any) -> Submission:
    return asyncio.run(SweHandler(INSTANCE).collect(FakeSandbox(commands=commands), None))


def test_diff_is_collected() -> None:
    assert collect(lambda argv, stdin: ExecResult(0, b"diff\n", b"")).files == {"model.patch": "diff\n"}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ExecResult(0, b"x" * 1_000_001, b""), "at most 1000000 bytes"),
        (ExecResult(128, b"", b"fatal: not a git repository"), "not a git repository"),
        (ExecResult(137, b"", b"Killed"), "Killed"),
        (ExecResult(127, b"", b"git: not found"), "git: not found"),
    ],
)
def test_missing_diff_has_a_reason(result: ExecResult, reason: str) -> None:
    assert reason in collect(lambda argv, stdin: result).files[REJECTED]


def test_diff_that_exceeds_its_time_limit_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="not computed within 45 s"):
        collect(lambda argv, stdin: ExecResult(None, b"", b"", timed_out=True))


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class _Folder(FakeSandbox):
    """A folder of this machine in which the git of this machine runs; `/workspace` and `/tmp` are in it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        (root / "workspace").mkdir()
        (root / "tmp").mkdir()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        result = {name: self._inside(value) if name == "FOLDER" else value for name, value in (env or {}).items()}
        done = await asyncio.to_thread(
            subprocess.run,
            argv,
            env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **result},
            cwd=self._inside(cwd or "/"),
            capture_output=True,
            input=re.sub(rb'"(/tmp/|/workspace)', f'"{self._root}\\1'.encode(), stdin),
        )
        return ExecResult(done.returncode, done.stdout, done.stderr)

    async def read_file(self, path: str) -> bytes:
        return await asyncio.to_thread(Path(self._inside(path)).read_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        await asyncio.to_thread(write, Path(self._inside(path)), data)

    def _inside(self, path: str) -> str:
        return f"{self._root}{path}"


@pytest.fixture
def folder(tmp_path: Path) -> _Folder:
    sandbox = _Folder(tmp_path)
    tree = tmp_path / "workspace"
    (tree / "code.py").write_text("a = 1\n")
    (tree / "test_code.py").write_text("old\n")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "kept.log").write_text("ignored, but part of the release\n")
    return sandbox


def prepared(folder: _Folder) -> Path:
    asyncio.run(SweHandler(INSTANCE).prepare(folder))
    return Path(folder._inside("/workspace"))


def difference(folder: _Folder) -> bytes:
    return patch_of(asyncio.run(SweHandler(INSTANCE).collect(folder, None)).files)


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=tree, env={**GIT_ENV, "PATH": os.environ["PATH"]}, capture_output=True
    )
    return done.stdout.decode()


def test_unchanged_tree_has_no_diff(folder: _Folder) -> None:
    prepared(folder)
    assert difference(folder) == b""


def test_baselines_are_reproducible(folder: _Folder) -> None:
    tree = prepared(folder)
    first = git(tree, "rev-parse", "HEAD")
    subprocess.run(["rm", "-rf", ".git"], cwd=tree, check=True)
    prepared(folder)
    assert git(tree, "rev-parse", "HEAD") == first != ""


def test_commits_of_the_policy_and_new_files_are_in_the_diff(folder: _Folder) -> None:
    tree = prepared(folder)
    (tree / "code.py").write_bytes(b"a = 2  # \xfc\n")
    git(tree, "commit", "-qam", "mine")
    (tree / "new.bin").write_bytes(bytes(range(256)))
    (tree / "noise.log").write_text("not wanted")
    (tree / ".git" / "index.lock").touch()
    patch = difference(folder)
    assert b"\xfc" in patch
    assert b"noise" not in patch
    (tree / ".git" / "index.lock").unlink()
    git(tree, "checkout", "-q", "-f", "refs/farm/baseline")
    git(tree, "clean", "-qfdx")
    assert asyncio.run(PatchedTree(folder, "/workspace", "/tmp/ours", 10).apply_policy(patch)).code == 0
    assert (tree / "new.bin").read_bytes() == bytes(range(256))
    assert (tree / "code.py").read_bytes() == b"a = 2  # \xfc\n"


def test_tests_are_replaced_by_ours_whatever_the_policy_changed(folder: _Folder) -> None:
    async def patched(patch: bytes) -> None:
        tree = PatchedTree(folder, "/workspace", "/tmp/ours", 10)
        await tree.baseline()
        assert (await tree.apply_policy(patch)).code == 0
        await tree.apply_tests(test_patch, [])

    tree = prepared(folder)
    (tree / "code.py").write_text("a = 2\n")
    (tree / "test_code.py").write_text("policy's\n")
    (tree / "test_new.py").write_text("policy's\n")
    (tree / "sub").mkdir()
    (tree / "sub" / "conftest.py").write_text("policy's\n")
    patch = difference(folder)
    subprocess.run(
        "git reset -q --hard refs/farm/baseline && git clean -qfd && rm -rf .git", cwd=tree, shell=True, check=True
    )
    test_patch = (
        "diff --git a/test_code.py b/test_code.py\n--- a/test_code.py\n+++ b/test_code.py\n@@ -1 +1 @@\n-old\n+ours\n"
        "diff --git a/test_new.py b/test_new.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_new.py\n"
        "@@ -0,0 +1 @@\n+ours\n"
    )
    asyncio.run(patched(patch))
    assert (tree / "code.py").read_text() == "a = 2\n"
    assert (tree / "test_code.py").read_text() == (tree / "test_new.py").read_text() == "ours\n"
    assert not (tree / "sub" / "conftest.py").exists()


def test_baseline_script_keeps_an_existing_repository(folder: _Folder) -> None:
    tree = prepared(folder)
    before = git(tree, "rev-list", "--all")
    prepared(folder)
    assert git(tree, "rev-list", "--all") == before
    assert "git init" in script("commit_baseline")


def test_folder_is_a_sandbox(folder: _Folder) -> None:
    sandbox: Sandbox = folder
    assert sandbox.sandbox_id == "fake"

"""The diff of any tree that a policy leaves is collected or rejected in bounded time, and never an error."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from examples.problems import swe_problems
from farm.errors import SandboxError
from workers.evaluators import node_conditions
from workers.evaluators.patches import PATCH, REJECTED
from workers.handlers.swe import SweHandler, SweInstance
from workers.plugins.interfaces import ExecResult, Submission
from workers.sandboxes.shortage import ShortageWindow
from workers.testing import FakeSandbox

INSTANCE = SweInstance.model_validate(swe_problems(1)[0].fields)
EDIT = "echo 'a = 2' > code.py; "
TAKEN = {
    "nothing_else": "",
    "filter_in_configuration": "git config filter.x.clean 'sleep 1000'; git config filter.x.required true; "
    "echo '* filter=x' > .gitattributes",
    "filter_process": "git config filter.x.process 'sleep 1000'; echo '* filter=x' > .git/info/attributes",
    "filter_of_the_user": "mkdir -p ~/.config/git; echo '* filter=x' > ~/.config/git/attributes",
    "fsmonitor": "git config core.fsmonitor 'sleep 1000'",
    "hooks": "mkdir -p hooks; printf '#!/bin/sh\\nsleep 1000\\n' > .git/hooks/post-index-change; "
    "chmod +x .git/hooks/post-index-change; rmdir hooks",
    "external_diff": "git config diff.external 'sleep 1000'; git config diff.x.textconv 'sleep 1000'; "
    "echo '*.py diff=x' > .gitattributes",
    "work_tree_elsewhere": "git config core.worktree /",
    "bare": "git config core.bare true",
    "lock_of_the_index": "touch .git/index.lock .git/HEAD.lock .git/config.lock",
    "index_a_fifo": "rm .git/index; mkfifo .git/index",
    "configuration_a_fifo": "rm .git/config; mkfifo .git/config",
    "configuration_includes_a_fifo": "mkfifo fifo; git config include.path ../fifo",
    "exclusions_a_fifo": "rm -f .git/info/exclude; mkfifo .git/info/exclude",
    "attributes_a_fifo": "mkfifo .git/info/attributes",
    "grafts_and_replacements": "export GIT_AUTHOR_NAME=x GIT_AUTHOR_EMAIL=x; "
    "export GIT_COMMITTER_NAME=x GIT_COMMITTER_EMAIL=x; "
    "git replace refs/farm/baseline $(git commit-tree -m x $(git mktree </dev/null)) ; "
    "mkdir -p .git/info; git rev-parse HEAD > .git/info/grafts",
    "sparse_checkout": "git config core.sparseCheckout true; echo nothing > .git/info/sparse-checkout",
    "packed_references": "git pack-refs --all; git gc -q",
    "own_commits": "git add -A; git -c user.name=x -c user.email=x commit -qm mine; git checkout -q -b other",
    "fifo_in_the_tree": "mkfifo pipe; mkdir sub; mkfifo sub/pipe",
    "socket_in_the_tree": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"",
    "large_ignored_file": "truncate -s 3G trace.log",
    "nested_repository": "git init -q nested; echo x > nested/x",
    "no_right_to_read": "echo x > closed; chmod 000 closed",
    "newline_in_a_name": "touch $'a\\nb' $'\\\\t c'",
    "deep_folders": "p=.; for i in $(seq 200); do p=$p/d; done; mkdir -p $p; touch $p/x",
    "patch_file_a_fifo": "mkfifo ../tmp/farm-model.patch || true",
    "own_git_on_the_path": "mkdir bin; printf '#!/bin/sh\\nsleep 1000\\n' > bin/git; chmod +x bin/git",
}
REFUSED = {
    "no_repository": ("rm -rf .git", "there is no repository"),
    "repository_a_file": ("rm -rf .git; echo 'gitdir: /' > .git", "there is no repository"),
    "repository_a_fifo": ("rm -rf .git; mkfifo .git", "there is no repository"),
    "repository_a_link_to_everything": ("rm -rf .git; ln -s / .git", "mark of the tree as given is gone"),
    "new_repository": ("rm -rf .git; git init -q", "mark of the tree as given is gone"),
    "mark_removed": ("git update-ref -d refs/farm/baseline", "mark of the tree as given is gone"),
    "mark_not_an_id": ("echo 'ref: refs/heads/x' > .git/refs/farm/baseline", "mark of the tree as given is gone"),
    "mark_an_option": ("echo '--help' > .git/refs/farm/baseline", "mark of the tree as given is gone"),
    "mark_of_nothing": ("printf '%040d\\n' 7 > .git/refs/farm/baseline", "repository is broken"),
    "objects_removed": ("rm -rf .git/objects; mkdir .git/objects", "repository is broken"),
    "alternates_to_nowhere": ("rm -rf .git/objects/??; echo /none > .git/objects/info/alternates", "is broken"),
    "sparse_file": ("truncate -s 3G sparse", "the file sparse is too large"),
    "large_file_below": ("mkdir sub; head -c 20M /dev/zero | tr '\\0' x > 'sub/a b'", "the file sub/a b is too large"),
    "large_file_in_place": ("truncate -s 1G code.py", "the file code.py is too large"),
    "large_patch": ("head -c 2M /dev/urandom | base64 > text", "at most 1000000 bytes"),
    "many_files": ("for i in $(seq 30); do head -c 50000 /dev/urandom | base64 > f$i; done", "at most 1000000 bytes"),
}


@pytest.fixture(autouse=True)
def _roomy_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore shortages of this machine, which other tests cause at the same time."""
    monkeypatch.setattr(ShortageWindow, "reason", lambda _: "")
    monkeypatch.setattr(node_conditions, "shortage", lambda: "")


class _Folder(FakeSandbox):
    """Runs the collecting commands in a folder of this machine, with a time limit like a sandbox."""

    def __init__(self, root: Path, limit_s: float = 60.0) -> None:
        super().__init__()
        self._root = root
        self._limit_s = limit_s
        for name in ("workspace", "tmp", "home"):
            (root / name).mkdir()

    async def exec(self, argv, *, timeout_s, stdin=b"", env=None, cwd=None, limits=None):  # type: ignore[no-untyped-def]
        return await asyncio.to_thread(self.run, shlex.join(argv), env or {})

    def run(self, script: str, env: dict[str, str]) -> ExecResult:
        result = {"PATH": os.environ["PATH"], "HOME": f"{self._root}/home", "TMPDIR": f"{self._root}/tmp", **env}
        try:
            done = subprocess.run(
                ["timeout", "-k", "1", str(self._limit_s), "bash", "-c", script],
                env=result,
                cwd=self._root / "workspace",
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        finally:
            self.check()
        timed_out = done.returncode in (124, 137)
        return ExecResult(None if timed_out else done.returncode, done.stdout, done.stderr, timed_out)


def collected(root: Path, edit: str, limit_s: float = 60.0) -> Submission:
    async def main() -> Submission:
        folder = _Folder(root, limit_s)
        tree = root / "workspace"
        (tree / "code.py").write_text("a = 1\n")
        (tree / ".gitignore").write_text("*.log\n")
        await SweHandler(INSTANCE).prepare(folder)
        done = folder.run(edit, {"GIT_CONFIG_GLOBAL": "/dev/null"})
        assert done.code == 0, done
        return await SweHandler(INSTANCE).collect(folder, "answer")

    return asyncio.run(main())


@pytest.mark.parametrize("name", TAKEN)
def test_diff_is_collected_from_a_tree_with(name: str, tmp_path: Path) -> None:
    files = collected(tmp_path, f"set -e; {EDIT}{TAKEN[name]}").files
    assert "+a = 2" in files[PATCH], files
    assert not list((tmp_path / "tmp").glob("tmp.*"))


def test_diff_has_no_bytecode(tmp_path: Path) -> None:
    compiled = "python3 -m compileall -q .; mkdir sub; cp -r __pycache__ sub; touch sub/new.py"
    patch = collected(tmp_path, f"set -e; {EDIT}{compiled}").files[PATCH]
    assert "+a = 2" in patch
    assert "sub/new.py" in patch
    assert "__pycache__" not in patch


@pytest.mark.parametrize("name", REFUSED)
def test_submission_is_rejected_for(name: str, tmp_path: Path) -> None:
    edit, reason = REFUSED[name]
    submission = collected(tmp_path, f"set -e; {EDIT}{edit}")
    assert reason in submission.files[REJECTED]
    assert submission.answer == "answer"


@pytest.mark.parametrize(
    "edit",
    [
        "rm -rf .git/objects/info; mkfifo .git/objects/info",
        "mkdir -p .git/objects/info; rm -f .git/objects/info/alternates; mkfifo .git/objects/info/alternates",
        "rm .gitignore; mkfifo .gitignore",
    ],
)
def test_delayed_git_finishes_or_is_stopped_at_the_time_limit(edit: str, tmp_path: Path) -> None:
    try:
        files = collected(tmp_path, f"set -e; {EDIT}{edit}", limit_s=3.0).files
    except TimeoutError:
        # a fresh sandbox shows that the policy caused it
        return
    assert "+a = 2" in files[PATCH]


def block_the_process() -> None:
    time.sleep(0.8)


class Hasty(SweHandler):
    """Waits a second for git."""

    git_s = 1.0


def test_time_limit_passed_while_this_process_was_blocked_is_an_error() -> None:
    class Frozen(FakeSandbox):
        async def exec(self, argv, *, timeout_s, stdin=b"", env=None, cwd=None, limits=None):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.05)
            block_the_process()
            return ExecResult(None, b"", b"", timed_out=True)

    async def frozen() -> Submission:
        return await Hasty(INSTANCE).collect(Frozen(), None)

    with pytest.raises(SandboxError, match="sandbox fake: its diff cannot be computed: the machine was late"):
        asyncio.run(frozen())

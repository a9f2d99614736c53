"""The policy's patch and the test patch put over a clean tree, in the order that keeps the tests ours.

Files of the test patch, and files that steer pytest or Python from beside the code, are brought back to what they were
before the tests are applied: a policy is scored for its fix, not for its tests.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from farm.errors import EvaluatorError
from workers.interfaces import ExecResult, Sandbox

PATCH = "model.patch"
PATCH_BASE64 = "model.patch.base64"
"""Instead of PATCH where the patch is not UTF-8."""
REJECTED = "rejected"
"""Why there is no patch to score, instead of one."""

GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
    "GIT_CONFIG_KEY_2": "core.fsmonitor",
    "GIT_CONFIG_VALUE_2": "false",
    "GIT_AUTHOR_NAME": "farm",
    "GIT_AUTHOR_EMAIL": "farm@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "farm",
    "GIT_COMMITTER_EMAIL": "farm@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
"""Makes git the same everywhere: fixed identity and date, no hooks, no configuration but its own."""

BASELINE = "refs/farm/baseline"
COMMIT_BASELINE = f"""
set -e
if ! git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  git init -q .
  git add -A -f
  git commit -q --allow-empty -m baseline
fi
git update-ref {BASELINE} HEAD
"""
"""Bash that marks the tree as it is now, in a repository of its own if there is none."""

_TOUCHED = re.compile(r"^(?:\+\+\+ b|--- a)/(.+?)\t?$", re.MULTILINE)
_STEERING = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    "tox.ini",
    "sitecustomize.py",
    "usercustomize.py",
)
_RESTORE = f"""
set -e
git add -A
git diff --cached --name-only -z --no-renames {BASELINE} > "$FOLDER/changed"
while IFS= read -r -d '' path; do
  case " $STEERING " in *" ${{path##*/}} "*) printf '%s\\0' "$path";; esac
done < "$FOLDER/changed" >> "$FOLDER/ours"
while IFS= read -r -d '' path; do
  git checkout -q {BASELINE} -- "$path" 2>/dev/null || rm -rf -- "$path"
done < "$FOLDER/ours"
"""


def patch_of(files: Mapping[str, str]) -> bytes:
    """The bytes of a submission's patch; empty if it has none."""
    if PATCH_BASE64 in files:
        return base64.b64decode(files[PATCH_BASE64])
    return files.get(PATCH, "").encode()


def patch_files(patch: bytes) -> dict[str, str]:
    """A submission's files for a patch, whatever its encoding."""
    try:
        text = patch.decode()
    except UnicodeDecodeError:
        return {PATCH_BASE64: base64.b64encode(patch).decode()}
    return {PATCH: text}


def touched(patch: str) -> list[str]:
    """The paths a unified diff changes, each once."""
    return list(dict.fromkeys(_TOUCHED.findall(patch)))


class PatchedTree:
    """A clean source tree in a sandbox, `folder` being where our own files lie, outside the tree."""

    def __init__(self, sandbox: Sandbox, tree: str, folder: str, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._tree = tree
        self._folder = folder
        self._timeout_s = timeout_s

    async def baseline(self) -> None:
        """Mark the clean tree. Raises EvaluatorError."""
        await self._must(COMMIT_BASELINE, "cannot commit the clean tree")

    async def apply_policy(self, patch: bytes) -> str:
        """Apply the policy's patch; why it does not apply, else an empty text."""
        if not patch.strip():
            return ""
        result = await self._apply(f"{self._folder}/model.patch", patch)
        return "" if result.code == 0 else _said(result)

    async def apply_tests(self, test_patch: str) -> None:
        """Bring our files back and put the tests over them. Raises EvaluatorError."""
        ours = "".join(f"{path}\0" for path in touched(test_patch))
        await self._sandbox.write_file(f"{self._folder}/ours", ours.encode())
        await self._must(_RESTORE, "cannot restore the test files")
        result = await self._apply(f"{self._folder}/test.patch", test_patch.encode())
        if result.code != 0:
            raise EvaluatorError(f"sandbox {self._sandbox.sandbox_id}: the test patch does not apply: {_said(result)}")

    async def _apply(self, path: str, patch: bytes) -> ExecResult:
        await self._sandbox.write_file(path, patch)
        return await self._bash(f"git apply --whitespace=nowarn '{path}'")

    async def _must(self, script: str, complaint: str) -> None:
        result = await self._bash(script)
        if result.code != 0:
            raise EvaluatorError(f"sandbox {self._sandbox.sandbox_id}: {complaint}: {_said(result)}")

    async def _bash(self, script: str) -> ExecResult:
        env = {**GIT_ENV, "FOLDER": self._folder, "STEERING": " ".join(_STEERING)}
        return await self._sandbox.exec(["bash", "-c", script], timeout_s=self._timeout_s, env=env, cwd=self._tree)


def _said(result: ExecResult) -> str:
    text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
    return text or f"it ended with code {result.code} and said nothing"

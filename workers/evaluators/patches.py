"""The policy's diff of a marked tree, and its application to a clean tree, in the order that keeps the tests intact.

Files that the policy must not change are restored before the tests are applied (`tree_guard.py` has the rule): a policy
is scored for its fix, not for its tests. The contents of its sandbox are untrusted input: if malformed, the submission
is rejected in bounded time, never an error.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from importlib.resources import files
from typing import Any

from farm.errors import EvaluatorError, SandboxError
from workers.evaluators.node_conditions import observed
from workers.evaluators.outcomes import Planted
from workers.evaluators.process_end import EndCause, ProcessEnd, doing
from workers.evaluators.program_source import source_of
from workers.plugins.interfaces import ExecResult, Sandbox, Submission

PATCH = "model.patch"
PATCH_BASE64 = "model.patch.base64"
"""The file that replaces PATCH if the patch is not UTF-8."""
REJECTED = "rejected"
"""The file that replaces the patch if there is none: its text is the reason."""

BASELINE = "refs/farm/baseline"
MAX_FILE_MB = 8
"""Size in MB beyond which a changed file is refused unread."""
_GIT_CONFIG = {
    "safe.directory": "*",
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.untrackedCache": "false",
    "core.quotePath": "true",
    "gc.auto": "0",
}
GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_COUNT": str(len(_GIT_CONFIG)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_GIT_CONFIG)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_GIT_CONFIG.values())},
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "farm"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "farm@localhost"),
    **dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2000-01-01T00:00:00Z"),
    "BASELINE": BASELINE,
    "MAX_FILE_MB": str(MAX_FILE_MB),
}
"""The environment of scripts: their inputs, and settings that make git reproducible: fixed identity and date, no hooks,
no other configuration."""

_MAX_UNPACKED_MB = 64
_TOUCHED = re.compile(r"^(?:\+\+\+ b|--- a)/(.+?)\t?$", re.MULTILINE)
_LITERAL = re.compile(rb"^(?:literal|delta) (\d+)$", re.MULTILINE)
_NEEDED = {"outcomes_reader": ("program_tests.descendants",)}
GIT_S = 45.0
"""Seconds for git; below the stage's limit for collecting, so that it is reached first."""
MAX_PATCH_BYTES = 1_000_000
TRIVIAL = "def test_trivial():\n    pass\n"
"""The file of a trivial test, if no name is known."""


def patch_of(files: Mapping[str, str]) -> bytes:
    """Return the bytes of a submission's patch; empty if it has none."""
    if PATCH_BASE64 in files:
        return base64.b64decode(files[PATCH_BASE64])
    return files.get(PATCH, "").encode()


def patch_files(patch: bytes) -> dict[str, str]:
    """Return a submission's files for a patch, whatever its encoding."""
    try:
        text = patch.decode()
    except UnicodeDecodeError:
        return {PATCH_BASE64: base64.b64encode(patch).decode()}
    return {PATCH: text}


def touched(patch: str) -> list[str]:
    """Return the paths that a unified diff changes, each once."""
    return list(dict.fromkeys(_TOUCHED.findall(patch)))


def unpacked_mb(patch: bytes) -> float:
    """Return the unpacked size that the binary parts of a patch declare."""
    return sum(int(size[:20]) for size in _LITERAL.findall(patch)) / 1e6


class NotRestored(Exception):
    """The tests could not be applied to a patched tree. A run over a clean tree decides the cause."""


class PatchedTree:
    """A clean source tree in a sandbox; `folder`, outside the tree, holds the evaluator's own files.

    `pythonpath` is relative to the tree. Raises EvaluatorError for failures before the policy's patch is applied.
    """

    def __init__(self, sandbox: Sandbox, tree: str, folder: str, timeout_s: float, pythonpath: str = ".") -> None:
        self._sandbox = sandbox
        self._tree = tree
        self._folder = folder
        self._timeout_s = timeout_s
        self._pythonpath = pythonpath
        self._names: list[str] = []

    async def baseline(self) -> None:
        """Mark the clean tree. Raises EvaluatorError."""
        result = await self._bash(script("commit_baseline"))
        if result.code != 0:
            raise EvaluatorError(
                f"sandbox {self._sandbox.sandbox_id}: cannot commit the clean tree: {output_end(result)}"
            )

    async def survey(self) -> list[str]:
        """Record the modules that Python finds before the patch; return pytest's installed plug-ins.

        Raises EvaluatorError, also if git or pytest is missing.
        """
        reply = await self._guard({"do": "survey"})
        if reply["missing"]:
            raise EvaluatorError(f"sandbox {self._sandbox.sandbox_id}: {reply['missing']}; fix its image")
        self._names = reply["names"]
        return list(reply["plugins"])

    async def apply_policy(self, patch: bytes) -> ExecResult:
        """Apply the policy's patch."""
        if unpacked_mb(patch) > _MAX_UNPACKED_MB:
            return ExecResult(1, b"", f"its files have more than {_MAX_UNPACKED_MB} MB".encode())
        await self._sandbox.write_file(f"{self._folder}/model.patch", patch)
        if not patch.strip():
            return ExecResult(0, b"", b"")
        return await self._bash('git apply --whitespace=nowarn "$FOLDER/model.patch"')

    async def apply_tests(self, test_patch: str, tests: Collection[str]) -> list[str]:
        """Restore protected files and apply the tests; return the restored paths. Raises NotRestored."""
        changed = await self._bash(script("list_changed"))
        if changed.code != 0:
            raise NotRestored(f"cannot tell what the patch changed: {output_end(changed)}")
        request = {"do": "restore", "changed": f"{self._folder}/changed", "baseline": BASELINE, "names": self._names}
        try:
            restored = await self._guard({**request, "tests": [*touched(test_patch), *tests]})
        except EvaluatorError as error:
            raise NotRestored(str(error)) from error
        if not test_patch.strip():
            return list(restored["restored"])
        await self._sandbox.write_file(f"{self._folder}/test.patch", test_patch.encode())
        result = await self._bash('git apply --whitespace=nowarn "$FOLDER/test.patch"')
        if result.code != 0:
            raise NotRestored(f"the test patch does not apply: {output_end(result)}")
        return list(restored["restored"])

    async def replace_tests(self, ids: Collection[str], tests: Collection[str]) -> None:
        """Undo the test patch; replace the tests of these ids by trivial ones, and create missing files of `tests`."""
        await self._bash('test ! -e "$FOLDER/test.patch" || git apply -R --whitespace=nowarn "$FOLDER/test.patch"')
        replaced = trivial_tests(ids)
        for path in tests:
            if path in replaced or (await self._bash(f"test -e {shlex.quote(path)}")).code != 0:
                text = replaced.get(path, TRIVIAL)
                await self._sandbox.write_file(f"{self._tree}/{path}", text.encode())

    async def plant(self, tests: Collection[str], copied: Collection[str] = ()) -> Planted:
        """Add canaries to the tests of these files, and copies of the tests of these ids. Raises EvaluatorError."""
        planted = await self.python("canaries", {"tests": list(tests), "copied": list(copied)}, "plant canaries")
        return Planted(**planted)

    async def _guard(self, request: Mapping[str, Any]) -> dict[str, Any]:
        purpose = "see what the environment holds" if request["do"] == "survey" else "restore the test files"
        reply: dict[str, Any] = await self.python("tree_guard", {**request, "pythonpath": self._pythonpath}, purpose)
        return reply

    async def python(self, program: str, request: Mapping[str, Any], purpose: str) -> Any:
        """Run one of the programs next to this module in the tree's Python, isolated. Raises EvaluatorError."""
        result = await run_program(self._sandbox, program, {**request, "tree": self._tree}, self._timeout_s)
        try:
            return json.loads(result.stdout)
        except ValueError:
            raise EvaluatorError(
                f"sandbox {self._sandbox.sandbox_id}: cannot {purpose}: {output_end(result)}"
            ) from None

    async def _bash(self, command: str) -> ExecResult:
        env = {**GIT_ENV, "FOLDER": self._folder}
        return await self._sandbox.exec(["bash", "-c", command], timeout_s=self._timeout_s, env=env, cwd=self._tree)


def script(name: str) -> str:
    """Return one of the bash scripts next to this module, which run in the tree with GIT_ENV."""
    return files("workers.evaluators").joinpath(f"{name}.sh").read_text()


async def run_program(sandbox: Sandbox, program: str, request: Mapping[str, Any], timeout_s: float) -> ExecResult:
    """Run one of this package's programs in a sandbox's Python; it reads and prints JSON."""
    command = ["python", "-I", "-c", source_of(*_NEEDED.get(program, ()), program)]
    return await sandbox.exec(command, timeout_s=timeout_s, stdin=json.dumps(request).encode(), env=GIT_ENV, cwd="/")


def output_end(result: ExecResult) -> str:
    """Return the end of a command's output, for a message."""
    text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
    if result.timed_out:
        text = f"it timed out; {text}".removesuffix("; ")
    return text or f"it ended with code {result.code}, without output"


async def difference(sandbox: Sandbox, tree: str, answer: str | None, git_s: float = GIT_S) -> Submission:
    """Return the diff against the marked tree, at most 1 MB, or a rejection if the policy broke its repository.

    Errors caused by the policy's tree are rejections. Raises SandboxError if the node was late or short of a resource,
    and TimeoutError if it takes so long that a fresh sandbox must decide the cause.
    """
    env = {**GIT_ENV, "MAX_BYTES": str(MAX_PATCH_BYTES + 1)}
    async with observed() as conditions:
        result = await sandbox.exec(["bash", "-c", script("collect_difference")], timeout_s=git_s, env=env, cwd=tree)
    if result.code != 0:
        cause, reason = doing(ProcessEnd.of(result, git_s, conditions))
        if cause is EndCause.FARM or conditions.shortage:
            raise SandboxError(f"sandbox {sandbox.sandbox_id}: its diff cannot be computed: {reason}")
        if cause is EndCause.UNKNOWN and result.timed_out:
            raise TimeoutError(f"its diff was not computed within {git_s:g} s: {output_end(result)}")
        return _rejected(answer, f"the tree's repository is broken, so there is no diff: {output_end(result)}")
    if len(result.stdout) > MAX_PATCH_BYTES:
        return _rejected(answer, f"the patch is too large; at most {MAX_PATCH_BYTES} bytes are scored")
    return Submission(answer=answer, files=patch_files(result.stdout))


def _rejected(answer: str | None, reason: str) -> Submission:
    return Submission(answer=answer, files={REJECTED: reason})


def trivial_tests(ids: Iterable[str]) -> dict[str, str]:
    """Return, by path, files with a trivial test for each of these pytest ids.

    A test of a class is put into a `unittest.TestCase`, which pytest collects under any name.
    """
    by_path: dict[str, dict[str, None]] = {}
    for test in ids:
        path, _, name = test.partition("[")[0].partition("::")
        by_path.setdefault(path, {})[_definition(name)] = None
    return {path: "import unittest\n" + "".join(definitions) for path, definitions in by_path.items()}


def _definition(name: str) -> str:
    *classes, function = name.split("::")
    if not all(part.isidentifier() for part in (*classes, function)):
        return f"\n\n{TRIVIAL}"
    if not classes:
        return f"\n\ndef {function}():\n    pass\n"
    return f"\n\nclass {classes[0]}(unittest.TestCase):\n    def {function}(self):\n        pass\n"

"""Bug fixes in real projects: the tree of a release, an issue, and the tests that the fix must turn green.

What is scored is the difference to the tree the policy was given, so commits, branches and stashes of its own do not
matter. Neither the gold patch nor the tests are ever in its sandbox.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from farm.errors import HandlerError, ToolError
from farm.request import Archive, SandboxSpec
from farm.trajectory import Message
from workers.evaluators.patches import BASELINE, COMMIT_BASELINE, GIT_ENV, REJECTED, patch_files, touched
from workers.evaluators.tests import PytestEvaluator, TestPlan
from workers.interfaces import Evaluator, ExecResult, Sandbox, Submission

_TREE = "/workspace"
_PATCH_FILE = "/tmp/farm-model.patch"  # noqa: S108  (of the sandbox, which nobody shares)
_MAX_PATCH_BYTES = 1_000_000
_GIT_S = 60.0
_SYSTEM = (
    f"The source tree of {{repo}} is in {_TREE}. Mend the issue you are shown by changing the source; do not change "
    "tests. Hidden tests check your change. When you are done, call submit."
)
# Written to a file, as what a command prints is cut.
_DIFF = f"""
set -e
rm -f .git/index.lock
git add -A
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames {BASELINE} > {_PATCH_FILE}
wc -c < {_PATCH_FILE}
"""


class BaseArchive(BaseModel):
    """The source archive of the base tree, as the package index serves it."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    sha256: str


class TestEnvironment(BaseModel):
    """What the tests need: exact packages, the import path within the tree, the command."""

    __test__: ClassVar[bool] = False
    model_config = ConfigDict(frozen=True)

    python: str = Field(pattern=r"^3\.\d+$")
    pip: tuple[str, ...]
    pythonpath: str = "."
    test_cmd: str = Field(min_length=1)


class SweInstance(BaseModel):
    """One issue. Fields that only document it are let pass."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str = Field(min_length=1)
    repo: str
    problem_statement: str = Field(min_length=1)
    hints_text: str = ""
    base_sdist: BaseArchive
    test_patch: str
    patch: str | None = None
    """The gold patch; never shown."""
    FAIL_TO_PASS: tuple[str, ...] = Field(min_length=1)
    PASS_TO_PASS: tuple[str, ...] = ()
    environment: TestEnvironment

    @field_validator("test_patch")
    @classmethod
    def _is_patch(cls, patch: str) -> str:
        if not touched(patch):
            raise ValueError("it is no unified diff with a/ and b/ paths")
        return patch

    def spec(self) -> SandboxSpec:
        """Raises pydantic's ValidationError if the archive or the packages are not exact."""
        base = self.base_sdist
        archive = Archive(name=base.name, version=base.version, sha256=base.sha256, path=_TREE)
        return SandboxSpec(archives=(archive,), packages=self.environment.pip, workdir=_TREE)

    def model_post_init(self, context: object, /) -> None:
        self.spec()


class SweHandler:
    """The policy edits a tree; its difference is collected, and tested over a clean one."""

    data_source: ClassVar[str] = "swe"
    instance_type: ClassVar[type[BaseModel]] = SweInstance
    agent: ClassVar[str] = "react"
    tools: ClassVar[Collection[str]] = ("bash", "edit", "submit")
    prepares_once: ClassVar[bool] = True

    def sandbox(self, instance: SweInstance) -> SandboxSpec | None:
        return instance.spec()

    def messages(self, instance: SweInstance) -> list[Message]:
        issue = instance.problem_statement
        if instance.hints_text.strip():
            issue += f"\n\nHints:\n{instance.hints_text}"
        return [
            {"role": "system", "content": _SYSTEM.format(repo=instance.repo)},
            {"role": "user", "content": issue},
        ]

    async def prepare(self, instance: SweInstance, sandbox: Sandbox) -> None:
        """Mark the tree as it is given. Raises HandlerError, for good if the farm's Python is another one."""
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        if instance.environment.python != ours:
            raise HandlerError(
                f"{instance.instance_id} needs Python {instance.environment.python}, the farm has {ours}",
                retryable=False,
            )
        result = await _git(sandbox, COMMIT_BASELINE)
        if result.code != 0:
            raise HandlerError(
                f"{instance.instance_id}: cannot commit the tree as given; is git there? {_said(result)}"
            )

    async def collect(self, instance: SweInstance, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """The difference to the tree as given, at most 1 MB; why there is none if the policy broke its repository."""
        if sandbox is None:
            raise HandlerError(f"{instance.instance_id}: the patch to score lies in a sandbox, and there is none")
        result = await _git(sandbox, _DIFF)
        size = re.fullmatch(rb"\s*(\d+)\s*", result.stdout)
        if result.code != 0 or size is None:
            return _rejected(answer, f"the tree's repository is broken, so there is no difference: {_said(result)}")
        if int(size[1]) > _MAX_PATCH_BYTES:
            return _rejected(answer, f"the patch has {int(size[1])} bytes; at most {_MAX_PATCH_BYTES} are scored")
        try:
            return Submission(answer=answer, files=patch_files(await sandbox.read_file(_PATCH_FILE)))
        except ToolError as missing:
            return _rejected(answer, f"the patch cannot be read: {missing}")

    def evaluator(self, instance: SweInstance) -> Evaluator:
        environment = instance.environment
        return PytestEvaluator(
            TestPlan(
                command=environment.test_cmd,
                tree=_TREE,
                pythonpath=environment.pythonpath,
                test_patch=instance.test_patch,
                fail_to_pass=instance.FAIL_TO_PASS,
                pass_to_pass=instance.PASS_TO_PASS,
            )
        )


async def _git(sandbox: Sandbox, script: str) -> ExecResult:
    return await sandbox.exec(["bash", "-c", script], timeout_s=_GIT_S, env=GIT_ENV, cwd=_TREE)


def _rejected(answer: str | None, reason: str) -> Submission:
    return Submission(answer=answer, files={REJECTED: reason})


def _said(result: ExecResult) -> str:
    text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
    return text or f"it ended with code {result.code} and said nothing"

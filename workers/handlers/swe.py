"""Bug fixes in real projects: the tree of a release, an issue, and the tests that the fix must turn green.

The diff to the original tree is scored, so the policy's own commits, branches and stashes do not matter. The sandbox
never contains the gold patch or the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from farm.errors import HandlerError
from farm.records.request import Archive, SandboxSpec
from farm.records.trajectory import Message
from workers.evaluators.patches import GIT_ENV, GIT_S, difference, output_end, script, touched
from workers.evaluators.tests import PytestEvaluator, TestPlan
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, ExecResult, Sandbox, Submission

_TREE = "/workspace"
_SYSTEM = (
    f"The source tree of {{repo}} is in {_TREE}. Fix the issue you are shown by changing the source; do not change "
    "tests. Hidden tests check your change. When you are done, call submit."
)


class BaseArchive(BaseModel):
    """The source archive of the base tree, as the package index serves it."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    sha256: str


class TestEnvironment(BaseModel):
    """The environment of the tests: exact packages, the import path within the tree, the command."""

    __test__: ClassVar[bool] = False
    model_config = ConfigDict(frozen=True)

    python: str = Field(pattern=r"^3\.\d+$")
    pip: tuple[str, ...]
    pythonpath: str = "."
    test_cmd: str = Field(min_length=1)


class SweInstance(BaseModel):
    """One issue. Documentary fields are ignored."""

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
            raise ValueError("the patch must be a unified diff with a/ and b/ prefixes")
        return patch

    def spec(self) -> SandboxSpec:
        """Return the sandbox of the issue. Raises pydantic's ValidationError if archive or packages are not exact."""
        base = self.base_sdist
        archive = Archive(name=base.name, version=base.version, sha256=base.sha256, path=_TREE)
        return SandboxSpec(archives=(archive,), packages=self.environment.pip, workdir=_TREE)

    def model_post_init(self, context: object, /) -> None:
        self.spec()


class SweHandler(Handler[SweInstance]):
    """The policy edits a tree; its diff is collected, and tested over a clean tree."""

    data_source: ClassVar[str] = "swe"
    instance_type: ClassVar[type[BaseModel]] = SweInstance
    tools: ClassVar[Collection[str]] = ("bash", "edit", "submit")
    prepares_once: ClassVar[bool] = True
    collect_s: ClassVar[float] = GIT_S + 15.0
    git_s: ClassVar[float] = GIT_S
    """Time limit of one git command in seconds."""

    def sandbox(self) -> SandboxSpec | None:
        return self.instance.spec()

    def messages(self) -> list[Message]:
        issue = self.instance.problem_statement
        if self.instance.hints_text.strip():
            issue += f"\n\nHints:\n{self.instance.hints_text}"
        return [
            {"role": "system", "content": _SYSTEM.format(repo=self.instance.repo)},
            {"role": "user", "content": issue},
        ]

    async def prepare(self, sandbox: Sandbox) -> None:
        """Mark the original tree. Raises HandlerError, not retryable if the farm's Python has another version."""
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self.instance.environment.python != version:
            raise HandlerError(
                f"{self.instance.instance_id} needs Python {self.instance.environment.python}, the farm has {version}",
                retryable=False,
            )
        result = await self._git(sandbox, script("commit_baseline"))
        if result.code != 0:
            raise HandlerError(
                f"{self.instance.instance_id}: cannot commit the given tree; is git installed? {output_end(result)}"
            )

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the diff to the original tree, at most 1 MB, or a rejection if the policy broke its repository.

        Errors caused by the policy's tree are rejections. Raises SandboxError if the node was late or short of a
        resource, TimeoutError if it takes so long that a fresh sandbox must decide the cause, and HandlerError if there
        is no sandbox.
        """
        if sandbox is None:
            raise HandlerError(f"{self.instance.instance_id}: the patch to score is in a sandbox, and there is none")
        return await difference(sandbox, _TREE, answer, self.git_s)

    async def _git(self, sandbox: Sandbox, command: str, **env: str) -> ExecResult:
        return await sandbox.exec(["bash", "-c", command], timeout_s=self.git_s, env={**GIT_ENV, **env}, cwd=_TREE)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        environment = self.instance.environment
        return PytestEvaluator(
            TestPlan(
                command=environment.test_cmd,
                tree=_TREE,
                pythonpath=environment.pythonpath,
                test_patch=self.instance.test_patch,
                fail_to_pass=self.instance.FAIL_TO_PASS,
                pass_to_pass=self.instance.PASS_TO_PASS,
                gold=self.instance.patch or "",
            )
        )

"""Unchanged rows of SWE data sets: an image, an issue, and a script whose log swebench grades.

The image's later commits and hidden tests, which reveal the solution, are removed before the policy starts. The diff to
the tree is scored, in a fresh sandbox of the image; `workers/evaluators/issues/resolution.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import BaseModel

from farm.errors import HandlerError
from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.evaluators.issues.issue import hide_solution, stage
from workers.evaluators.issues.issue_rows import IssueRow, image_of
from workers.evaluators.issues.resolution import IssueEvaluator
from workers.evaluators.patches import GIT_S, difference
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, Sandbox, Submission

_STAGE_S = 240.0
_SYSTEM = (
    "The source tree of {repo} is in {tree}. Fix the issue you are shown by changing the source; do not change tests. "
    "Hidden tests check your change. When you are done, call submit."
)


class SweBenchHandler(Handler[IssueRow]):
    """Issues of SWE-bench, SWE-Gym, SWE-smith, SWE-rebench and R2E-Gym, scored by their authors' rules."""

    data_source: ClassVar[str] = "swe-bench"
    instance_type: ClassVar[type[BaseModel]] = IssueRow
    tools: ClassVar[Collection[str]] = ("bash", "edit", "submit")
    prepares_once: ClassVar[bool] = True
    collect_s: ClassVar[float] = GIT_S + 15.0

    def sandbox(self) -> SandboxSpec | None:
        image = image_of(self.instance, self.task.config.swe_images)
        return SandboxSpec(image=image, packages=self.instance.packages, workdir=self.instance.tree)

    def messages(self) -> list[Message]:
        system = _SYSTEM.format(repo=self.instance.repo or "a project", tree=self.instance.tree)
        return [{"role": "system", "content": system}, {"role": "user", "content": self.instance.statement}]

    async def prepare(self, sandbox: Sandbox) -> None:
        """Make and mark the tree, and remove the solution from it. Raises HandlerError."""
        issue = self.instance.issue()
        await stage(sandbox, issue, _STAGE_S)
        await hide_solution(sandbox, issue, _STAGE_S)

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the diff to the tree. Raises the errors of `difference`, and HandlerError if there is no sandbox."""
        if sandbox is None:
            raise HandlerError(f"{self.instance.instance_id}: the patch to score is in a sandbox, and there is none")
        return await difference(sandbox, self.instance.tree, answer)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return IssueEvaluator(self.instance.issue(), self.task.config.sandboxes)

"""The handler of "follow the files": each file of the sandbox names another, and a number of hops leads to the answer.

The policy reads a file with bash (`cat q`), finds the name of the next, and answers `answer x`. A wrong name is worth
0, and one hop too few or too many leads to a wrong name: so the policy has to count.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, FreshSandbox, Sandbox, Score, Submission

FileName = Annotated[str, Field(pattern=r"^[a-z]$")]


class FollowFilesInstance(BaseModel):
    """One problem: the text of each file is the name of another."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[FileName, FileName]
    start: FileName
    hops: Annotated[int, Field(ge=1)]
    answer: FileName

    @model_validator(mode="after")
    def _answer_is_reached(self) -> Self:
        name = self.start
        for _ in range(self.hops):
            if name not in self.files:
                raise ValueError(f"there is no file {name!r} to read")
            name = self.files[name]
        if name != self.answer:
            raise ValueError(f"{self.hops} hops from {self.start!r} lead to {name!r}, not to {self.answer!r}")
        return self


class ExactMatch:
    """See `workers.plugins.interfaces.Evaluator`: 1 for the expected text, else 0."""

    name: ClassVar[str] = "exact_match"

    def __init__(self, expected: str) -> None:
        self._expected = expected

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        return Score(float(submission.answer == self._expected), {"expected": self._expected})


class FollowFilesHandler(Handler[FollowFilesInstance]):
    """See `workers.plugins.handler.Handler`."""

    data_source: ClassVar[str] = "follow_files"
    instance_type: ClassVar[type[BaseModel]] = FollowFilesInstance
    tools: ClassVar[Collection[str]] = ("bash",)
    prepares_once: ClassVar[bool] = True

    def sandbox(self) -> SandboxSpec | None:
        return SandboxSpec()

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": f"follow {self.instance.start} hops {self.instance.hops}"}]

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write all files by one command, as each command is a process."""
        script = "\n".join(f"printf %s {shlex.quote(text)} >{name}" for name, text in self.instance.files.items())
        result = await sandbox.exec(["bash", "-ec", script], timeout_s=30.0)
        if result.code != 0:
            raise RuntimeError(f"the files could not be written: {result.stderr.decode(errors='replace')[-500:]}")

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return ExactMatch(f"answer {self.instance.answer}")

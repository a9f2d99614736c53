"""HumanEval: complete a Python function; the file that the policy leaves in the sandbox is scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farm.errors import HandlerError, ToolError
from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.evaluators.programs import SOLUTION, ProgramEvaluator
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, Sandbox, Submission

_PATH = f"/workspace/{SOLUTION}"
_MAX_BYTES = 1_000_000
_SYSTEM = (
    f"Write the Python function you are shown into {_PATH}, complete with its imports. Use the tools to write and try "
    "it. Hidden tests call the function. When the file is final, call submit."
)


class CodeInstance(BaseModel):
    """One problem, with the fields of HumanEval; `canonical_solution` is never shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*$")
    test: str
    canonical_solution: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CodeInstance:
        if f"def {self.entry_point}(" not in self.prompt:
            raise ValueError(f"the prompt does not define the entry point {self.entry_point!r}")
        if "def check(" not in self.test:
            raise ValueError("the test does not define check(candidate)")
        return self


class CodeHandler(Handler[CodeInstance]):
    """The policy writes, tests and submits; the checks run elsewhere, on the file only."""

    data_source: ClassVar[str] = "code"
    instance_type: ClassVar[type[BaseModel]] = CodeInstance
    tools: ClassVar[Collection[str]] = ("bash", "edit", "python", "submit")

    def sandbox(self) -> SandboxSpec | None:
        return SandboxSpec()

    def messages(self) -> list[Message]:
        task = f"Complete this function in {_PATH}:\n\n```python\n{self.instance.prompt}\n```"
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the file as a submission; a missing or too large one is an empty submission."""
        if sandbox is None:
            raise HandlerError(f"{self.instance.task_id}: the file to score is in a sandbox, and there is none")
        try:
            data = await sandbox.read_file(_PATH)
        except ToolError:
            return Submission(answer=answer)
        if len(data) > _MAX_BYTES:
            return Submission(answer=answer)
        # Databases accept neither NUL nor incomplete characters.
        text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
        return Submission(answer=answer, files={SOLUTION: text})

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return ProgramEvaluator(self.instance.prompt, self.instance.test, self.instance.entry_point)

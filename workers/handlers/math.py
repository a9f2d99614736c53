"""Problems of reasoning-gym: a question, an answer, and the verifier of the problem's family."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.evaluators.answer import AnswerEvaluator
from workers.plugins.handler import Handler
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator

_SYSTEM = (
    "Solve the problem. You may compute with the python tool. Then call submit with the answer alone, in exactly the "
    "form that the problem asks for; or reply with it between <answer> and </answer>."
)
_NAME = re.compile(r'^DATASET_NAME = "(\w+)"|^register_dataset\(\s*"(\w+)"', re.MULTILINE)


@cache
def families() -> frozenset[str]:
    """Return the families of the installed reasoning-gym, read from its source: an import takes a second and 100 MB."""
    spec = find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = (path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.py"))
    return frozenset(name for text in texts for names in _NAME.findall(text) for name in names if name)


class MathInstance(BaseModel):
    """One entry of one family, as created by reasoning-gym."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    question: str = Field(min_length=1)
    answer: str | None
    """The reference answer; None for the few families that have none."""
    metadata: dict[str, Any]

    @field_validator("family")
    @classmethod
    def _known(cls, family: str) -> str:
        if family not in families():
            raise ValueError(f"reasoning-gym has no family {family!r}; use one of: {', '.join(sorted(families()))}")
        return family


class MathHandler(Handler[MathInstance]):
    """Answers are submitted or given as text; a sandbox is available for computing."""

    data_source: ClassVar[str] = "math"
    instance_type: ClassVar[type[BaseModel]] = MathInstance
    tools: ClassVar[Collection[str]] = ("python", "submit")

    def sandbox(self) -> SandboxSpec | None:
        return SandboxSpec()

    def messages(self) -> list[Message]:
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.instance.question}]

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return AnswerEvaluator(
            self.instance.family,
            {
                "question": self.instance.question,
                "answer": self.instance.answer,
                "metadata": dict(self.instance.metadata),
            },
        )

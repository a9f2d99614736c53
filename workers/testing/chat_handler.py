"""One question, one answer, no tools and no sandbox: to try an engine, and to measure what a waiting rollout costs."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from farm.records.request import SandboxSpec
from farm.records.trajectory import Message
from workers.interfaces import Evaluator, FreshSandbox, Sandbox, Score, Submission


class ChatInstance(BaseModel):
    """`read_request` is the policy's prompt; `expected`, if given, must be in its answer for a reward of 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    expected: str = ""


class ChatHandler:
    """Scores 1.0 if the answer holds what is expected, else 0.0."""

    data_source: ClassVar[str] = "chat"
    instance_type: ClassVar[type[BaseModel]] = ChatInstance
    agent: ClassVar[str] = "react"
    tools: ClassVar[Collection[str]] = ()

    def sandbox(self, instance: ChatInstance) -> SandboxSpec | None:
        return None

    def messages(self, instance: ChatInstance) -> list[Message]:
        return [{"role": "user", "content": instance.question}]

    async def prepare(self, instance: ChatInstance, sandbox: Sandbox) -> None:
        """Nothing to stage."""

    async def collect(self, instance: ChatInstance, sandbox: Sandbox | None, answer: str | None) -> Submission:
        return Submission(answer=answer)

    def evaluator(self, instance: ChatInstance) -> Evaluator:
        return ContainsEvaluator(instance.expected)


class ContainsEvaluator:
    """1.0 if the answer holds a text, else 0.0."""

    name: ClassVar[str] = "contains"

    def __init__(self, expected: str) -> None:
        self._expected = expected

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        return Score(float(self._expected in (submission.answer or "")))

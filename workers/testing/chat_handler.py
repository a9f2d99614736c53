"""A handler with one question and one answer, without tools or sandbox: to try an engine, and for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from farm.records.trajectory import Message
from workers.plugins.handler import Handler
from workers.plugins.interfaces import Evaluator, FreshSandbox, Score, Submission
from workers.plugins.roles import NO_MODELS, ChatModel


class ChatInstance(BaseModel):
    """`question` is the policy's prompt; `expected`, if given, must be in the answer for a reward of 1.

    `call_reward`, if given, is the reward of each call, and of each training row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    expected: str = ""
    call_reward: float | None = None


class ChatHandler(Handler[ChatInstance]):
    """Scores 1.0 if the answer contains the expected text, else 0.0."""

    data_source: ClassVar[str] = "chat"
    instance_type: ClassVar[type[BaseModel]] = ChatInstance
    scores_calls: ClassVar[bool] = True

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.instance.question}]

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return ContainsEvaluator(self.instance.expected, self.instance.call_reward)


class ContainsEvaluator:
    """Scores 1.0 if the answer contains a text, else 0.0."""

    name: ClassVar[str] = "contains"

    def __init__(self, expected: str, call_reward: float | None = None) -> None:
        self._expected = expected
        self._call_reward = call_reward

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        value = float(self._expected in (submission.answer or ""))
        if self._call_reward is None:
            return Score(value)
        of_calls = {call.index: self._call_reward for call in submission.calls}
        of_rows = {call.row: self._call_reward for call in submission.calls if call.row is not None}
        return Score(value, call_rewards=of_calls, row_rewards=of_rows)

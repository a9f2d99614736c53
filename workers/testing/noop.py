"""Handlers and agents for tests: one question and one answer to try an engine, and the empty rollout with reward 1.

The empty rollout, without sandbox or LLM, measures the farm's own cost and failure handling.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.errors import AgentError, EngineError, EvaluatorError, HandlerError, RolloutError, SandboxError
from farm.records.request import SandboxSpec
from farm.records.rollout import Outcome, Stage
from farm.records.trajectory import Message
from workers.plugins.handler import Handler
from workers.plugins.interfaces import (
    NO_MODELS,
    AgentContext,
    AgentResult,
    ChatModel,
    Evaluator,
    FreshSandbox,
    Score,
    Submission,
)

_ERRORS: dict[str, type[RolloutError]] = {
    error.kind: error for error in (SandboxError, EngineError, EvaluatorError, AgentError, HandlerError)
}
_ENDLESS = re.compile("(a+)+$")


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


class NoopInstance(BaseModel):
    """`seconds` is the sleep in the run stage. `stuck` makes it misbehave as handlers must not: `loop` blocks the event
    loop, `lock` the interpreter, and `deaf` ignores cancellation.

    `fail` raises an error in a stage, such as `run:engine_error`.

    The errors are the kinds of RolloutError; `bug` is an exception of no such kind, `final` a HandlerError that is not
    retried, and `exit` calls `sys.exit`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["noop"] = "noop"
    seconds: float = Field(default=0.0, ge=0)
    stuck: Literal["", "loop", "lock", "deaf"] = ""
    fail: str = Field(
        default="",
        pattern=r"^((init|run|eval):(sandbox_error|engine_error|evaluator_error|agent_error|handler_error|bug|final|exit))?$",
    )

    def fail_in(self, stage: Stage) -> None:
        """Raise the error that the instance requests for this stage, if any."""
        stage_name, _, kind = self.fail.partition(":")
        if stage_name != stage.value:
            return
        if kind == "bug":
            raise RuntimeError(f"the instance asks for a bug in {stage.value}")
        if kind == "exit":
            sys.exit(f"the instance asks to exit in {stage.value}")
        if kind == "final":
            raise HandlerError(f"the instance asks for a final error in {stage.value}", retryable=False)
        raise _ERRORS[kind](f"the instance asks for {kind} in {stage.value}")


class NoopHandler(Handler[NoopInstance]):
    """Passes the instance to the agent as the text of the first message."""

    data_source: ClassVar[str] = "noop"
    instance_type: ClassVar[type[BaseModel]] = NoopInstance
    agent: ClassVar[str] = "noop"

    def sandbox(self) -> SandboxSpec | None:
        """Return None; raises the error requested for the init stage."""
        self.instance.fail_in(Stage.INIT)
        return None

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.instance.model_dump_json()}]

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return NoopEvaluator(self.instance)


class EmptyHandler(NoopHandler):
    """The same, declared to need no sandbox: once a node has run one, rollouts skip the init stage."""

    data_source: ClassVar[str] = "empty"
    without_sandbox: ClassVar[bool] = True


class NoopEvaluator:
    """Scores 1 at once."""

    name: ClassVar[str] = "noop"

    def __init__(self, instance: NoopInstance) -> None:
        self._instance = instance

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        self._instance.fail_in(Stage.EVAL)
        return Score(1.0)


class NoopAgent:
    """Calls no LLM; sleeps as long as the instance says, or not at all without a noop instance in its first message."""

    async def run(self, context: AgentContext) -> AgentResult:
        instance = _instance(context)
        instance.fail_in(Stage.RUN)
        await _SLEEPS[instance.stuck](instance.seconds)
        return AgentResult(Outcome.SUBMITTED, "noop")


async def _on_the_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - that is what it is for


async def _with_the_lock(seconds: float) -> None:
    # The expression runs longer than any caller waits, and the library does not check for signals meanwhile.
    _ENDLESS.match("a" * 64 + "b")


async def _ignoring_cancellation(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(left_s)


_SLEEPS: dict[str, Callable[[float], Awaitable[None]]] = {
    "": asyncio.sleep,
    "loop": _on_the_loop,
    "lock": _with_the_lock,
    "deaf": _ignoring_cancellation,
}


def _instance(context: AgentContext) -> NoopInstance:
    text = str(context.messages[0].get("content")) if context.messages else ""
    try:
        return NoopInstance.model_validate_json(text)
    except ValueError:
        return NoopInstance()

"""The agent that plays an environment with steps: the policy speaks, the environment answers, until one has ended.

A limit that the policy reaches is an outcome, and the rewards up to there count. What the environment breaks is an
error, whatever the policy said before. The process of the environment ends with the play, however that ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farm.errors import AgentError, HandlerError, LimitReached
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall, ToolCall
from workers.agents.actions import cut, tool_calls
from workers.environments.environment import Action, Begin, CalledTool, Step
from workers.environments.environment_servers import environment_servers
from workers.environments.episode import EpisodeConnection
from workers.environments.instance import EnvironmentInstance
from workers.interfaces import AgentContext, AgentResult, Completion
from workers.policy.recording import Stopwatch, as_applied, model_call

MAX_INVALID_TURNS = 5
"""Number of consecutive turns without a call or a text that the environment can be given, that ends a rollout."""

_MAX_SHOWN_CHARS = 200
_RESET_S = 300.0


class EnvironmentAgent:
    """Plays any environment; one object serves any number of rollouts at once."""

    async def run(self, context: AgentContext) -> AgentResult:
        """Play an episode to its end. Raises EngineError, SandboxError, HandlerError."""
        instance = context.instance
        if not isinstance(instance, EnvironmentInstance) or context.provider is None:
            raise AgentError(f"{context.rollout_id}: agent environment plays instances of data_source environment only")
        servers = environment_servers()
        connection = await servers.connect(instance.program, context.provider(), instance.packages)
        try:
            return await _EpisodePlay(context, instance, connection).run()
        finally:
            connection.drop()


class _EpisodePlay:
    """One running rollout."""

    def __init__(self, context: AgentContext, instance: EnvironmentInstance, connection: EpisodeConnection) -> None:
        self._context = context
        self._instance = instance
        self._connection = connection
        self._begin = Begin(())
        self._history: list[Message] = []
        self._n_sampled = 0
        self._n_invalid = 0
        self._rewards: list[float] = []
        self._last: ModelCall | None = None

    async def run(self) -> AgentResult:
        context = self._context
        self._begin = await self._connection.reset(self._instance.episode, _RESET_S, self._ask_role)
        self._history = [dict(message) for message in self._begin.messages]
        # from here on it is scored, however it ends
        context.rewards = self._rewards
        try:
            outcome = await self._turns()
        except LimitReached as limit:
            outcome = limit.outcome
        await self._finish()
        return AgentResult(outcome, _last_text(self._history))

    async def _turns(self) -> Outcome:
        for index in range(self._context.limits.max_turns):
            call = await self._ask(index)
            await self._context.record(call)
            outcome = await self._act(call)
            await self._context.record(call)
            self._history += call.observations
            if outcome is not None:
                return outcome
        return Outcome.MAX_TURNS

    async def _finish(self) -> None:
        """Ask for the last reward, which belongs to the last turn."""
        last = await self._connection.finish(self._context.limits.tool_s, self._ask_role)
        if last is None:
            return
        if self._last is None:
            self._rewards.append(last)
            return
        self._rewards[-1] += last
        self._last.reward = self._rewards[-1]
        await self._context.record(self._last)

    async def _ask(self, index: int) -> ModelCall:
        sampling, watch = self._context.sampling, Stopwatch()
        left = self._context.limits.max_tokens - self._n_sampled
        if left <= 0:
            raise LimitReached(Outcome.MAX_TOKENS, f"{self._n_sampled} tokens are sampled")
        max_tokens = min(left, sampling.max_tokens or left)
        completion: Completion = await self._context.policy.complete(
            list(self._history), self._begin.tools, sampling, max_tokens
        )
        # each message is recorded once: later turns add only what the environment answered, which is with its turn
        added = self._history if index == 0 else []
        call = model_call(index, added, completion, watch, as_applied(sampling, max_tokens))
        self._history.append(completion.response)
        self._n_sampled += completion.n_response_tokens
        return call

    async def _act(self, call: ModelCall) -> Outcome | None:
        """Let the environment answer, and note its reward with the turn; return the outcome if the episode is over."""
        call.n_invalid = 0
        requested = tool_calls(call.response)
        valid = [called for each in requested if (called := self._readable(each, call)) is not None]
        if requested and not valid:
            self._n_invalid += 1
            return Outcome.INVALID_ACTION if self._n_invalid >= MAX_INVALID_TURNS else None
        self._n_invalid = 0
        step = await self._connection.step(
            Action(_text(call.response), tuple(valid)), self._context.limits.tool_s, self._ask_role
        )
        self._rewards.append(step.reward)
        call.reward = step.reward
        self._last = call
        limit = self._context.limits.max_observation_chars
        call.observations += [{**each, "content": cut(each["content"], limit)} for each in step.messages]
        return _outcome(step)

    def _readable(self, requested: ToolCall, call: ModelCall) -> CalledTool | None:
        """Return a call for the environment; one that it cannot be given is answered here."""
        names = [tool["function"]["name"] for tool in self._begin.tools]
        complaint = ""
        arguments: Any = {}
        if requested.name not in names:
            shown = cut(requested.name or requested.arguments, _MAX_SHOWN_CHARS)
            complaint = f"There is no tool {shown!r}. Call one of: {', '.join(names) or 'none; answer in text'}."
        else:
            try:
                arguments = json.loads(requested.arguments or "{}")
            except (ValueError, RecursionError) as error:
                complaint = f"The arguments of {requested.name} are not JSON ({error}). Send one JSON object."
            if not complaint and not isinstance(arguments, dict):
                complaint = f"The arguments of {requested.name} must be one JSON object."
        if not complaint:
            return CalledTool(requested.call_id, requested.name, arguments)
        call.n_invalid += 1
        call.observations.append({"role": "tool", "tool_call_id": requested.call_id, "content": complaint})
        return None

    async def _ask_role(self, role: str, messages: Sequence[Message]) -> str:
        """Ask an LLM that the batch has named for a role; its tokens are no part of what is trained on."""
        model = self._context.models.get(role) if role in self._instance.program.roles else None
        if model is None:
            raise HandlerError(
                f"environment {self._instance.environment} asks the role {role!r}, which is not among its `roles`",
                retryable=False,
            )
        return await model.complete(messages, SamplingParams())


def _outcome(step: Step) -> Outcome | None:
    if step.terminated:
        return Outcome.SUBMITTED
    return Outcome.MAX_TURNS if step.truncated else None


def _text(message: Message) -> str:
    content: Any = message.get("content")
    return content if isinstance(content, str) else ""


def _last_text(history: Sequence[Message]) -> str | None:
    """Return what the policy said last, for people."""
    return next((_text(each) for each in reversed(history) if each["role"] == "assistant"), None)

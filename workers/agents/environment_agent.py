"""The agent for multi-step environments: policy and environment take turns until one of them ends the episode.

If the policy reaches a limit, that is an outcome, and the rewards so far count. A failing environment is an error,
unless it fails twice on the policy's texts and not without them: then its last step is worth 0. If a shared server
ends, its episodes continue from their recorded actions. Repetitions get a separate sandbox, so that they neither end
other episodes nor are ended by them. The environment's process ends with the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from farm.errors import AgentError, HandlerError, LimitReached
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import Message, ModelCall, ToolCall
from workers.agents.actions import cut, ended_by, next_call, tool_calls
from workers.environments.environment import Action, Begin, CalledTool, Step
from workers.environments.environment_program import EnvironmentInstance
from workers.environments.environment_servers import environment_servers
from workers.environments.episode import Ask, BrokenEpisode, EpisodeConnection, ServerEnded, no_verifier
from workers.plugins.interfaces import AgentContext, AgentResult, SandboxProvider, Verify
from workers.policy.recording import RepeatedTurns, text_of

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

MAX_INVALID_TURNS = 5
"""Number of consecutive turns without a usable call or text for the environment that ends a rollout."""

_MAX_SHOWN_CHARS = 200
_RESET_S = 300.0
_NO_ANSWER = "I do not know."


class EnvironmentAgent:
    """Runs any environment; one object serves any number of concurrent rollouts."""

    async def run(self, context: AgentContext) -> AgentResult:
        """Run an episode to its end. Raises EngineError, SandboxError, HandlerError."""
        instance = context.instance
        if not isinstance(instance, EnvironmentInstance) or context.provider is None:
            raise AgentError(f"{context.rollout_id}: agent environment runs only instances of data_source environment")
        episode_run = _EpisodeRun(context, instance, context.provider())
        try:
            return await episode_run.run()
        finally:
            episode_run.drop()


class _EpisodeRun:
    def __init__(self, context: AgentContext, instance: EnvironmentInstance, provider: SandboxProvider) -> None:
        self._context = context
        self._instance = instance
        self._provider = provider
        self._connection: EpisodeConnection | None = None
        self._has_broken = False
        self._actions: list[Action] = []
        self._begin = Begin(())
        self._history: list[Message] = []
        self._n_sampled = 0
        self._n_invalid = 0
        self._rewards: list[float] = []
        self._last: ModelCall | None = None
        self._verify: Verify = context.verify or no_verifier

    async def run(self) -> AgentResult:
        context = self._context
        self._connection = await self._connected()
        try:
            self._begin = await self._connection.reset(self._instance.episode, _RESET_S, self._ask_role)
        except ServerEnded:
            self._broke()
            self._connection = await self._connected()
            self._begin = await self._connection.reset(self._instance.episode, _RESET_S, self._ask_role)
        self._history = [dict(message) for message in self._begin.messages]
        # From here on it is scored, however it ends.
        context.rewards = self._rewards
        try:
            outcome = await self._turns()
        except LimitReached as limit:
            outcome = limit.outcome
        await self._finish()
        # The policy's last text is for people.
        texts = (_text(each) for each in reversed(self._history) if each["role"] == "assistant")
        return AgentResult(outcome, next(texts, None))

    def drop(self) -> None:
        """End the environment's process."""
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    async def _turns(self) -> Outcome:
        repeated = RepeatedTurns(self._context.limits.max_repeats)
        for index in range(self._context.limits.max_turns):
            call = await self._ask(index)
            await self._context.record(call)
            outcome = await self._act(call)
            await self._context.record(call)
            self._history += call.observations
            if outcome is Outcome.SUBMITTED:
                return ended_by(call, outcome)
            if outcome is not None:
                return outcome
            if repeated.repeat_with(call.response, map(text_of, call.observations)):
                return Outcome.REPEATING
        return Outcome.MAX_TURNS

    async def _finish(self) -> None:
        last = await self._carried_out(None)
        if not isinstance(last, float):
            return
        if self._last is None:
            self._rewards.append(last)
            return
        self._rewards[-1] += last
        self._last.reward = self._rewards[-1]
        await self._context.record(self._last)

    async def _ask(self, index: int) -> ModelCall:
        tools = cast("Sequence[ChatCompletionToolParam]", self._begin.tools)
        # Each message is recorded once: later turns add only the environment's answer, recorded with its turn.
        added = list(self._history) if index == 0 else []
        call = await next_call(self._context, index, self._history, added, tools, self._n_sampled)
        self._n_sampled += call.n_response_tokens
        return call

    async def _act(self, call: ModelCall) -> Outcome | None:
        """Let the environment answer, and record its reward with the turn; return the outcome if the episode ended."""
        call.n_invalid = 0
        requested = tool_calls(call.response)
        valid = [called for each in requested if (called := self._readable(each, call)) is not None]
        if requested and not valid:
            self._n_invalid += 1
            return Outcome.INVALID_ACTION if self._n_invalid >= MAX_INVALID_TURNS else None
        self._n_invalid = 0
        step = await self._carried_out(Action(_text(call.response), tuple(valid)))
        if not isinstance(step, Step):
            broken = {"role": "user", "content": f"The environment broke on this: {step}"}
            step = Step([broken], reward=0.0, terminated=True)
        self._rewards.append(step.reward)
        call.reward = step.reward
        self._last = call
        limit = self._context.limits.max_observation_chars
        call.observations += [{**each, "content": cut(each["content"], limit)} for each in step.messages]
        if step.terminated:
            return Outcome.SUBMITTED
        return Outcome.MAX_TURNS if step.truncated else None

    async def _carried_out(self, action: Action | None) -> Step | float | BrokenEpisode | None:
        """Carry out an action, or close the episode. Return the error that the policy's texts cause, if any."""
        if self._connection is None:
            return None
        role_replies = self._connection.role_replies
        try:
            outcome: Step | float | BrokenEpisode | None = await self._requested(
                self._connection, action, self._ask_role
            )
        except (BrokenEpisode, ServerEnded) as broken:
            self._broke()
            outcome = await self._settled(action, broken, role_replies)
        if action is not None:
            self._actions.append(action)
        return outcome

    def _broke(self) -> None:
        self.drop()
        self._has_broken = True

    async def _settled(
        self, action: Action | None, broken: BrokenEpisode | ServerEnded, role_replies: Sequence[str]
    ) -> Step | float | BrokenEpisode | None:
        """Attribute a failure. Raises HandlerError if the environment also fails without the policy's texts."""
        if isinstance(broken, ServerEnded):
            # Most likely caused by another episode.
            try:
                return await self._repeated(action, role_replies)
            except BrokenEpisode as error:
                broken = error
        control = await self._connected()
        control.verify = _unread
        try:
            await self._control(control, role_replies)
        except HandlerError as error:
            raise HandlerError(f"{broken}; and without the policy's texts: {error}") from error
        finally:
            control.drop()
        try:
            return await self._repeated(action, role_replies)
        except BrokenEpisode as error:
            return error

    async def _repeated(self, action: Action | None, role_replies: Sequence[str]) -> Step | float | None:
        """Repeat the recorded actions, then carry out the next one and continue. Raises BrokenEpisode."""
        connection = await self._connected()
        try:
            replies = iter(role_replies)

            async def reply(role: str, messages: Sequence[Message]) -> str:
                known = next(replies, None)
                return await self._ask_role(role, messages) if known is None else known

            await connection.reset(self._instance.episode, _RESET_S, reply)
            connection.verify = _unread
            for each in self._actions:
                await self._requested(connection, each, reply)
            connection.verify = self._verify
            outcome = await self._requested(connection, action, reply)
        except BaseException:
            connection.drop()
            raise
        self._connection = connection
        return outcome

    async def _control(self, connection: EpisodeConnection, role_replies: Sequence[str]) -> None:
        """Run an episode with as many steps, without the policy's texts."""
        replies = iter(role_replies)

        async def reply(role: str, messages: Sequence[Message]) -> str:
            return next(replies, _NO_ANSWER)

        tool_s = self._context.limits.tool_s
        await connection.reset(self._instance.episode, _RESET_S, reply)
        for _ in range(len(self._actions) + 1):
            text = await connection.reference(tool_s)
            step = await connection.step(Action(_NO_ANSWER if text is None else text), tool_s, reply)
            if step.terminated or step.truncated:
                break
        await connection.finish(tool_s, reply)

    async def _requested(self, connection: EpisodeConnection, action: Action | None, ask: Ask) -> Step | float | None:
        tool_s = self._context.limits.tool_s
        if action is None:
            return await connection.finish(tool_s, ask)
        return await connection.step(action, tool_s, ask)

    async def _connected(self) -> EpisodeConnection:
        instance = self._instance
        program = replace(instance.program, shared=False) if self._has_broken else instance.program
        connection = await environment_servers().connect(program, self._provider, instance.packages)
        connection.rewards = instance.reward_range
        connection.verify = self._verify
        return connection

    def _readable(self, requested: ToolCall, call: ModelCall) -> CalledTool | None:
        """Return a call for the environment; an unusable one is answered here."""
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
        """Ask the batch's LLM of a role; its tokens are never trained on."""
        model = self._context.models.get(role) if role in self._instance.program.roles else None
        if model is None:
            raise HandlerError(
                f"environment {self._instance.environment} asks the role {role!r}, which is not among its `roles`",
                retryable=False,
            )
        return await model.complete(messages, SamplingParams())


async def _unread(family: str, entry: Mapping[str, Any], settings: Mapping[str, Any], answer: str) -> float:
    """Return 0 for an answer whose reward is not used."""
    return 0.0


def _text(message: Message) -> str:
    content: Any = message.get("content")
    return content if isinstance(content, str) else ""

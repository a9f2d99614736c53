"""The simplest agent loop: the policy answers, its tool calls run, it sees the results, until it submits.

Reaching a limit is an outcome, never an error. The caller enforces the deadline by cancelling; all state of a rollout
is local to `run`, so nothing is left behind.
"""

from __future__ import annotations

from typing import Any

from farm.errors import AgentError, LimitReached, RolloutError, ToolError
from farm.records.rollout import STEP_ENDS, Outcome
from farm.records.trajectory import Message, ModelCall, ToolCall
from workers.agents.actions import InvalidCall, cut, ended_by, next_call, parse, schemas, tool_calls
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Observation
from workers.policy.recording import RepeatedTurns, text_of

MAX_INVALID_CALLS = 5
"""Number of consecutive invalid tool calls that ends a rollout."""

TEXT = "text/plain"


class ReactAgent:
    """An agent with tool calls of the chat API; one object serves any number of concurrent rollouts."""

    async def run(self, context: AgentContext) -> AgentResult:
        """Run a rollout to its end. Raises EngineError, SandboxError, and AgentError if a tool fails."""
        react_run = _ReactRun(context)
        try:
            for index in range(context.limits.max_turns):
                result = await react_run.turn(index)
                if result is not None and not await react_run.goes_on(result):
                    return result
                if react_run.repeats():
                    return AgentResult(Outcome.REPEATING)
        except LimitReached as limit:
            return AgentResult(limit.outcome)
        return AgentResult(Outcome.MAX_TURNS)


class _ReactRun:
    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._history: list[Message] = list(context.messages)
        self._schemas = schemas(context.tools)
        self._unrecorded: list[Message] = list(context.messages)
        self._n_sampled = 0
        self._n_invalid = 0
        self._n_steps = 0
        self._repeated = RepeatedTurns(context.limits.max_repeats)
        self._answer: Message = {}
        self._observed: list[str] = []
        """The results of the last answer, without the names of artefacts, which contain the turn's number."""

    async def goes_on(self, result: AgentResult) -> bool:
        """Return whether the task has another step; its messages are then in the conversation."""
        # A text cut short by the limit of its call is the policy's answer to this step.
        left = self._context.limits.max_tokens - self._n_sampled
        cut_short = result.outcome is Outcome.MAX_TOKENS and result.answer is not None and left > 0
        if self._context.next_messages is None or not (cut_short or result.outcome in STEP_ENDS):
            return False
        self._n_steps += 1
        self._unrecorded = list(await self._context.next_messages(self._n_steps, result.answer))
        self._history += self._unrecorded
        self._observed += map(text_of, self._unrecorded)
        return bool(self._unrecorded)

    def repeats(self) -> bool:
        """Return whether the completed turn is one repetition too many. To be called once per turn."""
        return self._repeated.repeat_with(self._answer, self._observed)

    async def turn(self, index: int) -> AgentResult | None:
        """Run one model call and its tool calls; return the rollout's result, or None if it goes on."""
        call = await self._ask(index)
        await self._context.record(call)
        requested = tool_calls(call.response)
        if not requested:
            return AgentResult(ended_by(call, Outcome.ANSWERED), _text(call.response))
        ended = await self._act(requested, call)
        await self._context.record(call)
        self._history += call.observations
        return ended

    async def _ask(self, index: int) -> ModelCall:
        # Each message is recorded once; tool results are the observations before.
        added, self._unrecorded = self._unrecorded, []
        call = await next_call(self._context, index, self._history, added, self._schemas, self._n_sampled)
        self._answer, self._observed = call.response, []
        self._n_sampled += call.n_response_tokens
        return call

    async def _act(self, requested: list[ToolCall], call: ModelCall) -> AgentResult | None:
        # Unparseable calls are included, and counted with the rest.
        call.n_invalid = 0
        for tool_call in requested:
            observation = await self._observe(tool_call, call)
            self._observed.append(cut(observation.text, self._context.limits.max_observation_chars))
            text = await self._shown(observation, tool_call.name, call.index)
            call.observations.append({"role": "tool", "tool_call_id": tool_call.call_id, "content": text})
            if observation.done:
                return AgentResult(Outcome.SUBMITTED, observation.answer)
            if self._n_invalid >= MAX_INVALID_CALLS:
                return AgentResult(Outcome.INVALID_ACTION)
        return None

    async def _shown(self, observation: Observation, tool: str, index: int) -> str:
        limit = self._context.limits.max_observation_chars
        artefacts = list(observation.artefacts)
        if len(observation.text) > limit and not any(each.media_type == TEXT for each in artefacts):
            artefacts.append(Artefact(f"{tool}.txt", TEXT, observation.text.encode("utf-8", "replace")))
        names = [name for each in artefacts if (name := await self._context.keep(index, each))]
        note = f"\n[kept with the rollout, outside the sandbox: {', '.join(names)}]" if names else ""
        room = limit - len(note)
        return cut(observation.text, room) + note if room > 0 else cut(observation.text, limit)

    async def _observe(self, tool_call: ToolCall, call: ModelCall) -> Observation:
        try:
            tool, arguments = parse(tool_call, self._context.tools)
        except InvalidCall as invalid:
            self._n_invalid += 1
            call.n_invalid += 1
            return Observation(str(invalid))
        self._n_invalid = 0
        try:
            return await tool.call(arguments, self._context.limits.tool_s)
        except ToolError as complaint:
            return Observation(str(complaint))
        except (RolloutError, LimitReached):
            raise
        except Exception as error:
            raise AgentError(
                f"tool {tool_call.name} broke in rollout {self._context.rollout_id}: {type(error).__name__}: {error}"
            ) from error


def _text(message: Message) -> str | None:
    content: Any = message.get("content")
    return content if isinstance(content, str) else None

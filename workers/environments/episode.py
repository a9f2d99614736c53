"""One episode on the node: requests to its process in the sandbox, and validation of all replies.

Any violation of the contract by an environment is a HandlerError: it raises, hangs, exits, sends text that is not JSON,
or a reward that is not a finite number in its range. None of it is ever a reward. BrokenEpisode is raised if the
policy's text may be the cause, ServerEnded if a shared server has ended.

If the environment has set a problem, the reward of a step is the node's verdict on the answer that it found.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from farm.errors import HandlerError
from farm.records.trajectory import Message
from workers.environments.environment import Action, Begin, Episode, PosedProblem, Step
from workers.plugins.interfaces import Verify

MAX_LINE_BYTES = 64_000_000
"""Maximum bytes of one reply."""

DEFAULT_REWARDS = (-1.0, 1.0)
"""The range of a step's reward if neither the class nor the instance declares one."""

_ROLES = frozenset({"system", "user", "tool", "assistant"})
_OFFLINE = ("ConnectionError", "NameResolutionError", "URLError", "LocalEntryNotFoundError", "OfflineModeIsEnabled")
_MOST_MESSAGES = 1000

Ask = Callable[[str, Sequence[Message]], Awaitable[str]]
"""Asks the LLM of a role; its exceptions propagate."""


class BrokenEpisode(HandlerError):
    """The episode's own process raised, hung, exited or sent an invalid reply; the policy's text may be the cause."""


class ServerEnded(HandlerError):
    """The server of several episodes has ended; any of them may be the cause, or none."""


async def no_models(role: str, messages: Sequence[Message]) -> str:
    """Refuse: there is no LLM besides the policy."""
    raise HandlerError(f"its environment asks the role {role!r}, which is not in its class's `roles`")


async def no_verifier(family: str, entry: Mapping[str, Any], settings: Mapping[str, Any], answer: str) -> float:
    """Refuse: there is no verifier for answers."""
    raise HandlerError("its environment needs a verifier for its answers, and there is none")


class EpisodeConnection:
    """A connection to the process of one episode. `name` is the environment's, for messages."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.released: Callable[[], None] = lambda: None
        """Called once, when the connection is dropped."""
        self.rewards: tuple[float, float] | None = None
        """The declared range of a step's reward; None uses DEFAULT_REWARDS, and an error then names the remedy."""
        self.verify: Verify = no_verifier
        """Scores the answer to a problem."""
        self.shared = False
        """True if its server also has other episodes."""
        self.role_replies: list[str] = []
        """The replies of the LLMs of roles, in order."""
        self._name = name
        self._reader = reader
        self._writer = writer
        self._problem: Mapping[str, Any] | None = None

    async def reset(self, episode: Episode, timeout_s: float, ask: Ask = no_models) -> Begin:
        """Begin the episode. Raises HandlerError, like all methods; BrokenEpisode if its own process fails."""
        reply = self._object(await self._request({"reset": asdict(episode)}, "reset()", timeout_s, ask), "reset()")
        tools = reply.get("tools")
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise self._broken("reset() returned tools that are not functions in the form of the OpenAI API")
        messages, problem = self._messages(reply.get("messages"), "reset()"), reply.get("problem")
        if not messages:
            remedy = (
                "" if episode.messages else ": an environment that takes its prompt from the instance needs `messages`"
            )
            raise self._broken(f"reset() returned no message for the policy{remedy}")
        if problem is None:
            return Begin(messages, tools)
        if not _is_problem(problem):
            raise self._broken("reset() returned a problem without family, entry and settings")
        self._problem = problem
        return Begin(messages, tools, PosedProblem(**problem))

    async def step(self, action: Action, timeout_s: float, ask: Ask = no_models) -> Step:
        """Carry out an action."""
        reply = self._object(await self._request({"step": asdict(action)}, "step()", timeout_s, ask), "step()")
        ends = [reply.get(name) for name in ("terminated", "truncated")]
        if not all(isinstance(each, bool) for each in ends) or not isinstance(reply.get("info"), dict):
            raise self._broken("step() returned no Step")
        messages = self._messages(reply.get("messages"), "step()")
        answer = reply.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise self._broken("step() returned an answer that is not a text")
        reward = await self._verdict(answer, reply.get("reward"))
        return Step(messages, reward, reply["terminated"], reply["truncated"], reply["info"], answer)

    async def _verdict(self, answer: str | None, reward: Any) -> float:
        if self._problem is None:
            return self._reward(reward, "step()")
        if answer is None:
            return 0.0
        family, entry, settings = (self._problem[each] for each in ("family", "entry", "settings"))
        return self._reward(await self.verify(family, entry, settings, answer), "the verifier")

    async def reference(self, timeout_s: float) -> str | None:
        """Return a text that solves the episode from its current state, if the environment knows one."""
        text = await self._request({"reference": {}}, "reference()", timeout_s, no_models)
        if text is not None and not isinstance(text, str):
            raise self._broken("reference() returned no text")
        return text

    async def finish(self, timeout_s: float, ask: Ask = no_models) -> float | None:
        """Call `close()`, and return its reward, if any."""
        reward = await self._request({"close": {}}, "close()", timeout_s, ask)
        return None if reward is None or self._problem is not None else self._reward(reward, "close()")

    def cut(self) -> None:
        """Close it because its server is gone: pending requests fail as if the process had ended."""
        self._writer.transport.abort()

    def drop(self) -> None:
        """Close the connection, which ends the process in any state. Idempotent."""
        self._writer.close()
        released, self.released = self.released, lambda: None
        released()

    async def _request(self, request: Mapping[str, Any], what: str, timeout_s: float, ask: Ask) -> Any:
        try:
            return await self._answer(request, what, timeout_s, ask)
        except (OSError, asyncio.IncompleteReadError):
            # A server reports on the connection how a process ended, unless it ended itself.
            if self.shared:
                raise ServerEnded(f"environment {self._name}: its server ended in {what}") from None
            raise self._broken(f"its process ended in {what}") from None

    async def _answer(self, request: Mapping[str, Any], what: str, timeout_s: float, ask: Ask) -> Any:
        message: Mapping[str, Any] = request
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(json.dumps(message).encode("ascii") + b"\n")
                    await self._writer.drain()
                    reply = await self._receive(what)
            except TimeoutError:
                raise self._broken(f"{what} took longer than {timeout_s:g} s") from None
            if "reply" in reply:
                return reply["reply"]
            if "ask" not in reply:
                raise self._failed(reply, what)
            # The time of another LLM is not charged to the environment.
            messages = self._messages(reply.get("messages"), f"{what}: ask()")
            message = {"text": await ask(str(reply["ask"]), messages)}
            self.role_replies.append(message["text"])

    async def _receive(self, what: str) -> Mapping[str, Any]:
        try:
            line = await self._reader.readuntil(b"\n")
            reply = json.loads(line)
        except asyncio.LimitOverrunError:
            raise self._broken(f"{what} returned more than {MAX_LINE_BYTES} bytes") from None
        except (ValueError, RecursionError) as error:
            raise self._broken(f"{what} sent a line that is not JSON ({type(error).__name__})") from None
        if not isinstance(reply, dict):
            raise self._broken(f"{what} sent an invalid reply")
        return reply

    def _failed(self, reply: Mapping[str, Any], what: str) -> BrokenEpisode:
        if "ended" in reply:
            return self._broken(f"its process ended {str(reply['ended'])[:100]} in {what}")
        error = str(reply.get("error", "no reply"))[:2000]
        if error.startswith(_OFFLINE):
            return self._broken(
                f"{what} needs data from the web, which its sandbox cannot reach; bring them in the instance's fields, "
                f"or in its image: {error}"
            )
        return self._broken(f"{what} broke: {error}")

    def _object(self, reply: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(reply, dict):
            raise self._broken(f"{what} returned no object")
        return reply

    def _messages(self, messages: Any, what: str) -> list[Message]:
        if not isinstance(messages, list) or len(messages) > _MOST_MESSAGES or not all(map(_is_message, messages)):
            raise self._broken(f"{what} returned messages that are not {{role, content}} with a text as content")
        return messages

    def _reward(self, reward: Any, what: str) -> float:
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
            raise self._broken(f"{what} gave {str(reward)[:100]} as the reward; it must be a finite number")
        least, most = self.rewards or DEFAULT_REWARDS
        if least <= reward <= most:
            return float(reward)
        outside = f"{what} gave {str(reward)[:100]} as the reward, outside of {least:g} to {most:g}"
        if self.rewards is not None:
            raise self._broken(outside)
        raise HandlerError(
            f"environment {self._name}: {outside}, the default range. Declare its own: `rewards = "
            "(LEAST, MOST)` in its class, or the field `rewards` of the instance",
            retryable=False,
        )

    def _broken(self, how: str) -> BrokenEpisode:
        return BrokenEpisode(f"environment {self._name}: {how}")


def _is_finite(number: float) -> bool:
    with suppress(OverflowError):
        return math.isfinite(number)
    return False


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in _ROLES
        and isinstance(message.get("content"), str)
        and isinstance(message.get("tool_call_id", ""), str)
    )


def _is_problem(problem: Any) -> bool:
    return (
        isinstance(problem, dict)
        and set(problem) == {"family", "entry", "settings"}
        and isinstance(problem["family"], str)
        and isinstance(problem["entry"], dict)
        and isinstance(problem["settings"], dict)
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])

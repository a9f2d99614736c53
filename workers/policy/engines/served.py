"""An engine as the farm uses it: a server's wire for token ids, its chat route and its control, over one connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx2
import orjson

from farm.engine import EngineInfo, PauseMode
from farm.errors import LimitReached
from farm.request import SamplingParams
from farm.rollout import Outcome
from farm.trajectory import Message, TokenIds
from workers.interfaces import Completion
from workers.policy.engines import failures, refusals
from workers.policy.engines.connection import FAILURES, Connection, Refusal
from workers.policy.engines.control import control
from workers.policy.engines.intake import Intake, without_echo
from workers.policy.engines.sglang import SglangWire
from workers.policy.engines.vllm import CompletionsWire, GenerateWire
from workers.policy.engines.wire import Ask, Wire, prompt_json
from workers.policy.generation import Engine, EngineAddress, EngineRefused, Generation, OnIds

if TYPE_CHECKING:
    from workers.policy.engines.chat import ChatRoute

_HEALTH_S = 5.0
_SHAPE = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading an answer raises that is not what the wire promises."""


def open_engine(address: EngineAddress, info: EngineInfo, *, timeout_s: float = 600.0) -> Engine:
    """A client for this event loop. `timeout_s` bounds how long a call may give no sign of life."""
    return ServedEngine(address, info, timeout_s=timeout_s)


class ServedEngine:
    """As Engine says."""

    def __init__(self, address: EngineAddress, info: EngineInfo, *, timeout_s: float) -> None:
        self.address = address
        self.info = info
        self._connection = Connection(address.url, address.key, timeout_s)
        self._wire = _wire(info)
        self._timeout_s = timeout_s
        self._control = control(info, self._connection, address.url)
        self._model = address.model or info.model

    @cached_property
    def _chat(self) -> ChatRoute:
        # the openai package takes most of a second to load, and an engine that takes ids does without it
        from workers.policy.engines.chat import ChatRoute

        return ChatRoute(self.address, self._connection.client, timeout_s=self._timeout_s)

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        on_ids: OnIds | None = None,
    ) -> Generation:
        """As Engine says. An engine that counts the answer into its context is asked again for what fits."""
        if self._wire is None:
            raise EngineRefused(f"engine {self.address.url} takes no token ids; it can only be asked to chat")
        ask = Ask(
            prompt_json(prompt_ids),
            sampling,
            self._fitting(len(prompt_ids), max_tokens),
            model or self._model or await self._chat.model(),
            on_ids is not None,
        )
        headers = {"x-session-id": session_id} if session_id else {}
        try:
            return await self._asked(self._wire, ask, prompt_ids, headers, on_ids)
        except Refusal as refusal:
            room = refusals.room(refusal.body) if refusal.status == 400 else 0
            if not 0 < room < ask.max_tokens:
                raise self._refused(refusal) from refusal
        smaller = Ask(ask.prompt_json, sampling, room, ask.model, ask.stream)
        try:
            return await self._asked(self._wire, smaller, prompt_ids, headers, on_ids)
        except Refusal as refusal:
            raise self._refused(refusal) from refusal

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        return await self._chat.complete(
            messages,
            tools,
            sampling,
            max_tokens,
            model=model or self._model,
            session_id=session_id,
            template_kwargs=template_kwargs,
        )

    async def healthy(self) -> bool:
        """A server without a route for it is well if it answers at all.

        SGLang's `/health` samples a token, and waits while it is paused; `/ready` does not.
        """
        paths = ("/ready", "/health") if self.info.kind == "sglang" else ("/health",)
        status = 0
        for path in paths:
            status = await self._connection.status(path, _HEALTH_S)
            if status != 404:
                break
        return 0 < status < 500

    async def pause(self, mode: PauseMode) -> None:
        await self._control.pause(mode)

    async def resume(self) -> None:
        await self._control.resume()

    async def paused(self) -> bool | None:
        return await self._control.paused()

    async def set_version(self, version: str) -> None:
        await self._control.set_version(version)

    async def version(self) -> str:
        return await self._control.version()

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _fitting(self, n_prompt: int, max_tokens: int) -> int:
        """As many as the context leaves room for."""
        if self.info.context_tokens is None:
            return max_tokens
        room = self.info.context_tokens - n_prompt
        if room <= 0:
            raise LimitReached(
                Outcome.CONTEXT_FULL,
                f"engine {self.address.url}: a prompt of {n_prompt} tokens in a context of {self.info.context_tokens}",
            )
        return min(max_tokens, room)

    async def _asked(
        self, wire: Wire, ask: Ask, prompt_ids: TokenIds, headers: dict[str, str], on_ids: OnIds | None
    ) -> Generation:
        """Raises Refusal; all other failures as the farm's errors."""
        intake = Intake(prompt_ids)
        body = orjson.dumps(wire.body(ask))
        try:
            if on_ids is None:
                answer = await self._connection.ask(wire.path, body, headers)
                self._take(wire, answer, ask, intake)
            else:
                async with self._connection.events(wire.path, body, headers) as events:
                    async for event in events:
                        new = self._take(wire, event, ask, intake)
                        if new:
                            on_ids(new)
        except FAILURES as error:
            raise failures.broken(self.address.url, error) from error
        try:
            return intake.generation()
        except ValueError as error:
            raise failures.unreadable(self.address.url, error) from error

    def _take(self, wire: Wire, content: bytes, ask: Ask, intake: Intake) -> list[int]:
        try:
            event = orjson.loads(without_echo(content, ask.prompt_json))
            _raise_late(event)
            return wire.take(event, intake)
        except _SHAPE as error:
            raise failures.unreadable(self.address.url, error) from error

    def _refused(self, refusal: Refusal) -> Exception:
        return failures.refused(self.address.url, refusal.status, refusal.headers, refusal.body)


def _raise_late(event: Any) -> None:
    """An error that came too late for an HTTP status is an event of its own, or an abort that names a status."""
    error = event.get("error")
    reason = (event.get("meta_info") or {}).get("finish_reason") or {}
    if error is not None:
        status = error.get("code") if isinstance(error, dict) else None
        raise Refusal(status if isinstance(status, int) else 500, httpx2.Headers(), orjson.dumps(event))
    if reason.get("type") == "abort" and reason.get("status_code"):
        raise Refusal(int(reason["status_code"]), httpx2.Headers(), orjson.dumps(reason))


def _wire(info: EngineInfo) -> Wire | None:
    wires: dict[str, Wire] = {
        "generate": GenerateWire(),
        "completions": CompletionsWire(),
        "sglang": SglangWire(info.model),
    }
    return wires.get(info.token_in)

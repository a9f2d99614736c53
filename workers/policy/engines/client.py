"""The client of an engine: its token wire, chat route and control, over one connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cached_property
from typing import Any

import httpx2
import orjson

from farm.errors import LimitReached
from farm.records.engine import EngineInfo
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import TokenIds
from workers.plugins.interfaces import Completion
from workers.policy.answer_form import guide_of
from workers.policy.engines import failures
from workers.policy.engines.chat_route import ChatRoute
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal, current_progress, most_bytes
from workers.policy.engines.generation_builder import (
    FLAG,
    AnotherTopK,
    GenerationBuilder,
    most_expert_bytes,
    without_echo,
)
from workers.policy.engines.kind import kind, wire_of
from workers.policy.engines.wire import SHAPE, GenerationRequest, Wire, prompt_json
from workers.policy.generation import (
    ChatRequest,
    Engine,
    EngineAddress,
    EngineRefused,
    ExpertRange,
    ExpertsMissing,
    FormUnsupported,
    Generation,
    OnIds,
)

_HEALTH_S = 5.0


def open_engine(address: EngineAddress, info: EngineInfo, *, timeout_s: float = 600.0) -> Engine:
    """Return a client for this event loop. `timeout_s` is the longest silence that a call allows."""
    return EngineClient(address, info, timeout_s=timeout_s)


class EngineClient:
    """The implementation of Engine."""

    def __init__(self, address: EngineAddress, info: EngineInfo, *, timeout_s: float) -> None:
        self.address = address
        self.info = info
        self._connection = EngineConnection(address.url, address.key, timeout_s)
        self._wire = wire_of(info)
        self._kind = kind(info.kind)
        self._timeout_s = timeout_s
        control = self._kind.control(info, self._connection)
        self.pause, self.resume, self.paused = control.pause, control.resume, control.paused
        self.set_version, self.version, self.load_weights = control.set_version, control.version, control.load_weights
        self._model = address.model or info.model

    @cached_property
    def _chat(self) -> ChatRoute:
        return ChatRoute(self.address, self._connection)

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        on_ids: OnIds | None = None,
        n_vocabulary: int | None = None,
        experts: ExpertRange | None = None,
    ) -> Generation:
        """Implement `Engine.generate`. A request that exceeds the context is retried with fewer `max_tokens`."""
        if self._wire is None:
            raise EngineRefused(f"engine {self.address.url} accepts no token ids, only chat requests")
        for name in sorted(self._wire.lacks):
            if getattr(sampling, name):
                raise EngineRefused(f"engine {self.address.url} lacks {name}: leave it out of the batch's sampling")
        ask = GenerationRequest(
            prompt_json(prompt_ids),
            sampling,
            self._fitting(len(prompt_ids), max_tokens),
            model or self._model or await self._chat.model(),
            (on_ids is not None and (experts is None or self._wire.streams_experts)) or self._wire.always_streams,
            experts,
        )
        headers = {"x-session-id": session_id} if session_id else {}
        try:
            builder = GenerationBuilder(prompt_ids, ask.max_tokens, n_vocabulary, experts)
            return await self._send(self._wire, ask, builder, headers, on_ids)
        except Refusal as refusal:
            room = failures.room(refusal.body) if refusal.status == 400 else 0
            if not 0 < room < ask.max_tokens:
                raise self._refused(refusal, sampling) from refusal
        smaller = replace(ask, max_tokens=room)
        try:
            builder = GenerationBuilder(prompt_ids, room, n_vocabulary, experts)
            return await self._send(self._wire, smaller, builder, headers, on_ids)
        except Refusal as refusal:
            raise self._refused(refusal, sampling) from refusal

    async def chat(self, request: ChatRequest) -> Completion:
        # vLLM refuses more than its whole context, and truncates a smaller value to the room that the prompt leaves.
        max_tokens = min(request.max_tokens, self.info.context_tokens or request.max_tokens)
        return await self._chat.complete(replace(request, model=request.model or self._model, max_tokens=max_tokens))

    async def healthy(self) -> bool:
        """Return whether the server is healthy; one without a health route, whether it answers at all."""
        status = 0
        for path in self._kind.health_paths:
            status = await self._connection.status(path, _HEALTH_S)
            if status != 404:
                break
        return 0 < status < 500

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _fitting(self, n_prompt: int, max_tokens: int) -> int:
        if self.info.context_tokens is None:
            return max_tokens
        room = self.info.context_tokens - n_prompt
        if room <= 0:
            raise LimitReached(
                Outcome.CONTEXT_FULL,
                f"engine {self.address.url}: a prompt of {n_prompt} tokens in a context of {self.info.context_tokens}",
            )
        return min(max_tokens, room)

    async def _send(
        self,
        wire: Wire,
        ask: GenerationRequest,
        builder: GenerationBuilder,
        headers: dict[str, str],
        on_ids: OnIds | None,
    ) -> Generation:
        """Send one request. Raises Refusal; all other failures as the farm's errors."""
        body = orjson.dumps(wire.body(ask))
        most = most_bytes(len(body), ask.max_tokens)
        if ask.experts is not None:
            most += most_expert_bytes(len(ask.prompt_json), ask.max_tokens, ask.experts)
        try:
            if not ask.stream:
                new = self._take(wire, await self._connection.ask(wire.path, body, headers, most), ask, builder)
                if on_ids is not None and new:
                    on_ids(new)
            else:
                # If no token arrives for so long, the engine hangs.
                async with (
                    asyncio.timeout(self._timeout_s) as silence,
                    self._connection.events(
                        wire.path, body, headers, most, ends_with_done=wire.ends_with_done
                    ) as events,
                ):
                    async for event in events:
                        new = self._take(wire, event, ask, builder)
                        if new:
                            current_progress().token()
                            silence.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                            if on_ids is not None:
                                on_ids(new)
        except FAILURES as error:
            raise failures.broken(self.address.url, error) from error
        try:
            generation = builder.generation()
        except AnotherTopK as error:
            raise ExpertsMissing(f"engine {self.address.url}: {error}; give the model's num_experts_per_tok") from error
        except ValueError as error:
            raise failures.unreadable(self.address.url, error) from error
        if ask.experts is not None and generation.routed_experts is None and len(generation.response_ids):
            raise ExpertsMissing(
                f"engine {self.address.url} gives no routed_experts: start it with {FLAG}, or leave routed_experts out "
                "of the batch's sampling"
            )
        return generation

    def _take(self, wire: Wire, content: bytes, ask: GenerationRequest, builder: GenerationBuilder) -> list[int]:
        try:
            rest = without_echo(content, ask.prompt_json)
            event = orjson.loads(content if rest is None else rest)
            if rest is not None:
                builder.saw(None, as_sent=True)
            _raise_late(event)
            return wire.take(event, builder)
        except SHAPE as error:
            raise failures.unreadable(self.address.url, error) from error

    def _refused(self, refusal: Refusal, sampling: SamplingParams) -> Exception:
        error = failures.refused(self.address.url, refusal.status, refusal.headers, refusal.body)
        if guide_of(sampling) and (type(error) is EngineRefused or refusal.status == 500):
            # The schemas come from programs: engines lack some keywords, and crash on others.
            return FormUnsupported(str(error))
        return error


def _raise_late(event: Any) -> None:
    """Raise Refusal for an `error` event, which came too late for an HTTP status."""
    error = event.get("error")
    if error is not None:
        status = error.get("code") if isinstance(error, dict) else None
        raise Refusal(status if isinstance(status, int) else 500, httpx2.Headers(), orjson.dumps(event))

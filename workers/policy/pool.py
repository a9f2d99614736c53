"""Which engine plays a rollout: the least busy, then the same for all its turns, so that prefixes stay cached."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from farm.errors import EngineError
from farm.request import SamplingParams
from farm.trajectory import Message
from workers.interfaces import Completion, Policy
from workers.policy.engines import ChatEngine, EngineAddress

_AVOID_S = 15.0
"""An engine that failed is passed over this long while there is another."""


class EnginePool:
    """The engines of a worker process; `addresses` is called before each model call, so it must be quick."""

    def __init__(
        self, addresses: Callable[[], Sequence[EngineAddress]], *, timeout_s: float = 600.0, max_retries: int = 2
    ) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[EngineAddress, ChatEngine]] = (
            WeakKeyDictionary()
        )
        self._outstanding: Counter[EngineAddress] = Counter()
        self._failed_at: dict[EngineAddress, float] = {}

    def policy(self, rollout_id: str, model: str = "") -> Policy:
        """The policy of one rollout; an empty model takes any engine."""
        return _RolloutPolicy(self, rollout_id, model)

    async def aclose(self) -> None:
        """Close the connections that this event loop opened. Harmless when repeated."""
        for engine in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await engine.aclose()

    def choose(self, model: str, stay: EngineAddress | None, without: EngineAddress | None = None) -> EngineAddress:
        """`stay` while it is healthy, else the least busy. Raises EngineError if no engine but `without` serves it."""
        listed = [address for address in self._addresses() if not model or address.model in ("", model)]
        choice = [address for address in listed if address != without]
        if not choice:
            raise EngineError(f"no engine serves {model or 'any model'}; register one with the farm")
        healthy = [address for address in choice if not self._avoided(address)] or choice
        if stay in healthy:
            return stay
        return min(healthy, key=lambda address: self._outstanding[address])

    async def ask(self, address: EngineAddress, request: _Request, model: str) -> Completion:
        self._outstanding[address] += 1
        try:
            completion = await self._client(address).complete(*request, model=model)
        except EngineError:
            self._failed_at[address] = time.monotonic()
            raise
        finally:
            self._outstanding[address] -= 1
        self._failed_at.pop(address, None)
        return completion

    def _client(self, address: EngineAddress) -> ChatEngine:
        clients = self._clients.setdefault(asyncio.get_running_loop(), {})
        if address not in clients:
            clients[address] = ChatEngine(address, timeout_s=self._timeout_s, max_retries=self._max_retries)
        return clients[address]

    def _avoided(self, address: EngineAddress) -> bool:
        failed_at = self._failed_at.get(address)
        return failed_at is not None and time.monotonic() - failed_at < _AVOID_S


_Request = tuple[Sequence[Message], Sequence[Mapping[str, Any]], SamplingParams, int]


class _RolloutPolicy:
    """One rollout's way to the engines: remembers where it plays."""

    def __init__(self, pool: EnginePool, rollout_id: str, model: str) -> None:
        self._pool = pool
        self._rollout_id = rollout_id
        self._model = model
        self._address: EngineAddress | None = None

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams, max_tokens: int
    ) -> Completion:
        """As Policy says; an engine that fails is replaced by another once."""
        request = (messages, tools, sampling, max_tokens)
        self._address = self._pool.choose(self._model, self._address)
        try:
            return await self._pool.ask(self._address, request, self._model)
        except EngineError as failure:
            try:
                self._address = self._pool.choose(self._model, None, without=self._address)
            except EngineError:
                raise EngineError(f"rollout {self._rollout_id}: {failure}") from failure
        try:
            return await self._pool.ask(self._address, request, self._model)
        except EngineError as failure:
            raise EngineError(f"rollout {self._rollout_id}: {failure}") from failure

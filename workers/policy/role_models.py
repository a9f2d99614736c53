"""The LLMs of roles besides the policy: plain chat on a server of the batch, or on the farm's engines of a model.

Their calls are not model calls of the rollout: no ids are requested, and nothing becomes a training row.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from farm.errors import EngineError, LimitReached
from farm.records.request import Role, RoleEngine, SamplingParams
from farm.records.trajectory import Message
from workers.plugins.interfaces import MAX_TOKENS, ChatModel, Completion
from workers.policy.generation import ChatRequest, EngineAddress, EngineRefused
from workers.policy.routing.pool import DedicatedEngines, EnginePool
from workers.policy.routing.router import Call, RoutingKey, StickyRouter

_CHARS_PER_TOKEN = 4
_OF_THE_POLICY = {"cache_salt": None, "min_tokens": None, "stop_token_ids": None}
"""Sampling parameters that concern only the policy's tokens and weights."""


class RoleModel:
    """The LLM of one role of one rollout, a ChatModel. `slots` limits the calls of all that share its settings."""

    def __init__(self, role: str, settings: RoleEngine, router: StickyRouter, slots: asyncio.Semaphore) -> None:
        self._role = role
        self._settings = settings
        self._router = router
        self._slots = slots

    @property
    def model(self) -> str:
        return self._settings.model

    @property
    def blocked(self) -> str:
        reason = self._router.blocked
        return f"role {self._role}: {reason}" if reason else ""

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        """Implement `ChatModel.complete`."""
        content = (await self.answer(messages, (), sampling)).response.get("content")
        return content if isinstance(content, str) else ""

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Completion:
        """Implement `ChatModel.answer`."""
        if self._settings.sampling is not None:
            sampling = self._settings.sampling.model_copy(update={"seed": sampling.seed})
        else:
            sampling = sampling.model_copy(update=_OF_THE_POLICY)
        limit = sampling.max_tokens or MAX_TOKENS
        request = ChatRequest(list(messages), limit, sampling, tools, model=self.model)
        async with self._slots:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    n_chars = sum(len(str(message.get("content") or "")) for message in request.messages)
                    call = Call(n_chars // _CHARS_PER_TOKEN + 1, request.max_tokens)
                    return await self._router.answer(call, lambda engine: engine.chat(request))
            except TimeoutError:
                waits = f" ({self.blocked})" if self.blocked else ""
                raise EngineError(
                    f"role {self._role}: no answer within {self._settings.timeout_s:g} s{waits}; check its server, or "
                    "raise the role's timeout_s"
                ) from None
            except LimitReached as error:
                raise EngineRefused(f"role {self._role}: {error}") from error
            except EngineError as error:
                named = EngineError(f"role {self._role}: {error}")
                named.retryable = error.retryable
                raise named from error


class RoleModels:
    """The LLMs of roles in a worker process. `farm_engines` returns the pool of the farm's own engines."""

    def __init__(self, dedicated: DedicatedEngines, farm_engines: Callable[[], EnginePool]) -> None:
        self._dedicated = dedicated
        self._farm_engines = farm_engines
        self._lock = threading.Lock()
        self._slots: WeakValueDictionary[RoleEngine, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def of(self, roles: Mapping[Role, RoleEngine], rollout_id: str) -> Iterator[Mapping[str, ChatModel]]:
        """Yield the models of a rollout's roles, by role. Thread-safe."""
        with ExitStack() as stack:
            yield {role: self._opened(stack, role, engine, rollout_id) for role, engine in roles.items()}

    def _opened(self, stack: ExitStack, role: str, settings: RoleEngine, rollout_id: str) -> RoleModel:
        if settings.engine_url:
            key = settings.engine_key or "none"
            address = EngineAddress(settings.engine_url, settings.model, key, plain_chat=True)
            pool = stack.enter_context(self._dedicated.pool(address))
        else:
            pool = self._farm_engines()
        router = StickyRouter(pool, RoutingKey(rollout_id, model=settings.model))
        # Shared by all rollouts of the process with these settings, removed with the last of them.
        with self._lock:
            slots = self._slots.setdefault(settings, asyncio.Semaphore(settings.n_parallel))
        return RoleModel(role, settings, router, slots)

"""Server-sent events for live parts of a page: a part is rendered again and sent when it has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.responses import StreamingResponse

from farm.api.endpoints import KEY_CHECK, Endpoints
from farm.errors import ServiceError, UsageError
from farm.web.rendering import HEADERS

PERIOD_S = 1.0
"""Seconds between two checks for one viewer."""
LONGEST_S = 600.0
"""Seconds after which a stream ends; the browser opens another one."""
MOST = 64
"""The maximum number of streams of one process; further clients get an answer to retry later."""

Look = Callable[[], Awaitable[tuple[str, bool]]]
"""A coroutine function that returns the present state of a part, and whether it is final."""

T = TypeVar("T")

_MOST = 200
"""Results of one kind that are kept."""
_SHARE = 50
"""A result is kept for so many times as long as it took, at least: each costs 2 % of a processor at most."""


class LiveUpdates:
    """The open streams of one process."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._n_open = 0

    def stream(self, look: Look) -> StreamingResponse:
        """Return a response that sends the part as event `part` whenever it changes, and `end` when it is final."""
        return StreamingResponse(
            self._events(look), headers={**HEADERS, "x-accel-buffering": "no"}, media_type="text/event-stream"
        )

    async def _events(self, look: Look) -> AsyncIterator[str]:
        if self._n_open >= MOST:
            yield "retry: 10000\n\n"
            return
        self._n_open += 1
        try:
            before = ""
            deadline = asyncio.get_running_loop().time() + LONGEST_S
            while asyncio.get_running_loop().time() < deadline and not self._endpoints.is_closed:
                try:
                    await KEY_CHECK.get()()
                    part, is_final = await look()
                except ServiceError:
                    # wait until the database is available again
                    part, is_final = before, False
                except UsageError:
                    # the key was revoked, or the batch is gone: the page shows it when it is loaded again
                    return
                # a line is sent now and then, so that a viewer who has gone is noticed
                yield _event("part", part) if part != before else ": \n\n"
                before = part
                if is_final:
                    yield _event("end", "")
                    return
                await asyncio.sleep(PERIOD_S)
        finally:
            self._n_open -= 1


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {name}\n{lines}\n"


class SharedResults(Generic[T]):
    """Results by key, each kept for `kept_s` or longer; concurrent requests wait for one computation."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._kept: dict[Any, tuple[float, T]] = {}
        self._locks: dict[Any, asyncio.Lock] = {}

    async def get(self, key: Any, make: Callable[[], Awaitable[T]], is_final: Callable[[T], bool] | None = None) -> T:
        """Return the kept result of a key, or compute it; one that `is_final` is kept thirty times as long."""
        if (kept := self._fresh(key)) is not None:
            return kept[1]
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if (kept := self._fresh(key)) is not None:
                    return kept[1]
                started = time.monotonic()
                value = await make()
                now = time.monotonic()
                kept_s = max(self._kept_s, _SHARE * (now - started))
                if is_final is not None and is_final(value):
                    kept_s = max(kept_s, 30 * self._kept_s)
                if len(self._kept) >= _MOST:
                    self._kept.clear()
                self._kept[key] = (now + kept_s, value)
                return value
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    def _fresh(self, key: Any) -> tuple[float, T] | None:
        kept = self._kept.get(key)
        return kept if kept is not None and kept[0] > time.monotonic() else None

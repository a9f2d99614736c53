"""Notification of requests that wait for a batch: one thread listens for all of them, instead of one for each."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from farm.notifications import ENDED, Signals

T = TypeVar("T")
log = logging.getLogger(__name__)

_LISTEN_S = 0.5
POLL_S = 0.5
"""Seconds between two queries of a waiting request without a notification."""


class BatchWaiters:
    """The waiting requests of one process. Notifications only save time: each request also polls."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._asking: set[asyncio.Future[Any]] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    async def wait_until(
        self,
        batch_id: str,
        ask: Callable[[], Coroutine[Any, Any, T]],
        settled: Callable[[T], bool],
        wait_s: float,
        poll_s: float = POLL_S,
    ) -> T:
        """Return the result once it is `settled`, or the last one when the time is over or this process ends."""
        self._listen()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        hint = asyncio.Event()
        self._waiting[batch_id].add(hint)
        try:
            result = await ask()
            while not (settled(result) or self._closed.is_set()) and (left_s := deadline - loop.time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(poll_s, left_s)):
                        await hint.wait()
                hint.clear()
                # hundreds of further queries would delay the end of the process
                result = await self._unless_closed(ask(), result)
            return result
        finally:
            self._waiting[batch_id].discard(hint)
            if not self._waiting[batch_id]:
                del self._waiting[batch_id]

    async def _unless_closed(self, asking: Coroutine[Any, Any, T], before: T) -> T:
        """Return the result of a query, or the previous one if this process ends during it."""
        if self._closed.is_set():
            asking.close()
            return before
        task = asyncio.ensure_future(asking)
        self._asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            return before
        finally:
            self._asking.discard(task)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Answer all waiting requests now."""
        self._closed.set()
        if n := sum(map(len, self._waiting.values())):
            log.warning("Shutdown: %d waiting requests are answered early; their clients repeat them", n)
        for batch_id in list(self._waiting):
            self._wake(batch_id)
        for task in list(self._asking):
            task.cancel()

    def _listen(self) -> None:
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._hear, args=(loop,), name="hints", daemon=True)
            self._thread.start()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = self._signals.listen(ENDED)
        try:
            while not self._closed.is_set():
                for batch_id in dict.fromkeys(listener.wait(_LISTEN_S)):
                    loop.call_soon_threadsafe(self._wake, batch_id)
        except RuntimeError:
            # the event loop ended before this thread
            if not loop.is_closed():
                raise
        finally:
            listener.close()

    def _wake(self, batch_id: str) -> None:
        for hint in self._waiting.get(batch_id, ()):
            hint.set()

"""Server-sent events for what changes while it is looked at: a part of a page, rendered again when it is another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import StreamingResponse

from farm.api.endpoints import KEY_CHECK, Endpoints
from farm.errors import ServiceError, UsageError
from farm.web.rendering import HEADERS

PERIOD_S = 1.0
"""Seconds between two looks of one viewer."""
LONGEST_S = 600.0
"""Seconds after which a stream ends; the browser begins another one."""
MOST = 64
"""Streams of one process; further ones are told to come back later."""

Look = Callable[[], Awaitable[tuple[str, bool]]]
"""A coroutine function that returns a part of a page as it is now, and whether it will not change again."""


class LiveUpdates:
    """The open streams of one process."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._n_open = 0

    def stream(self, look: Look) -> StreamingResponse:
        """Return an answer that sends the part as event `part` whenever it has changed, and `end` when it is final."""
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
                    # a database that is away is waited for
                    part, is_final = before, False
                except UsageError:
                    # the key was revoked, or the batch is gone: the page, asked for again, says so
                    return
                # a line that is sent now and then lets a viewer who has gone be noticed
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

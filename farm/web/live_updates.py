"""Server-sent events for live parts of a page: a part is rendered again and sent when it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

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

"""Streamed answers, sent while they are sampled; a disconnect of the client ends the sampling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects.model_api import Api, Events
from workers.policy.gateway.error_responses import forget_frames, problem_of, refusal

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has disconnected."""


class EventStreamResponse(Response):
    """Server-sent events. An error before the first event becomes a response with its own status."""

    def __init__(self, api: Api, events: Events, pieces: AsyncIterator[Delta | Completion | None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        # Its length is unknown.
        del self.headers["content-length"]
        self._api = api
        self._events = events
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected):
            refused = await until_disconnected(receive, self._answer(send))
            if refused is not None:
                await refused(scope, receive, send)

    async def _answer(self, send: Send) -> Response | None:
        """Send all events, or return the error response for an error before the first."""
        begun = False
        try:
            async with contextlib.aclosing(self._pieces) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if not begun:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await _send(send, self._events.begin())
                        begun = True
                    await _send(send, self._bytes(piece))
        except Exception as error:
            problem = problem_of(error)
            forget_frames(error)
            if not begun:
                return refusal(self._api, problem)
            await _send(send, self._events.error(problem))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    def _bytes(self, piece: Delta | Completion | None) -> bytes:
        if piece is None:
            return self._events.ping()
        return self._events.delta(piece) if isinstance(piece, Delta) else self._events.end(piece)


async def _send(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects first. Raises ClientDisconnected."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

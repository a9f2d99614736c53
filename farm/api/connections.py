"""Connections of an API: a time limit for receiving a request, and a limit of the bytes held for all together.

Without them, clients that send nothing, or half a request, use up descriptors and memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.api.schemas import RequestRejected
from farm.client import serialization
from farm.client.http_errors import ProblemDetails


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`request_s` is for the head of a request and for each piece of its body; `max_held_bytes` is of all requests that
    are read or answered at one time.
    """

    request_s: float = 30.0
    max_held_bytes: int = 2 * serialization.MAX_BODY_BYTES


_TOO_MUCH = ProblemDetails(503, "Overloaded", "too many large requests at once: try again")


class TimedConnection(H11Protocol):
    """One connection, closed if the head of a request is not whole in time."""

    def __init__(self, bounds: ConnectionLimits, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(self._is_begun())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self._is_begun())

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        super().connection_lost(exc)

    def _is_begun(self) -> bool:
        """Return whether a request is incomplete; between requests, uvicorn limits how long a connection is kept."""
        waits = self.conn.their_state is h11.IDLE
        return waits and (self.cycle is None or bool(self.conn.trailing_data[0]))

    def _watch(self, waits: bool) -> None:
        """Begin or end to wait for the head of a request."""
        if waits and self._timer is None:
            self._timer = self.loop.call_later(self._bounds.request_s, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RequestBodyLimit:
    """Refuses a request whose body stops coming, and one for which too much is held already."""

    def __init__(self, app: ASGIApp, bounds: ConnectionLimits) -> None:
        self._app = app
        self._bounds = bounds
        self._n_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n_mine, is_whole = 0, False

        async def bounded() -> Message:
            nonlocal n_mine, is_whole
            if is_whole:
                # what comes from now on is that the client hangs up
                return await receive()
            try:
                async with asyncio.timeout(self._bounds.request_s):
                    message = await receive()
            except TimeoutError:
                slow = f"no more of it came for {self._bounds.request_s:g} s"
                raise RequestRejected(ProblemDetails(408, "InvalidRequest", slow, "body")) from None
            is_whole = not message.get("more_body", False)
            n_bytes = len(message.get("body", b""))
            if self._n_held + n_bytes > self._bounds.max_held_bytes:
                raise RequestRejected(_TOO_MUCH)
            n_mine += n_bytes
            self._n_held += n_bytes
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._n_held -= n_mine

"""Connections of an API: their number, time limits for requests and responses, and a limit of the bytes held.

Without these limits, clients that send nothing or half a request, or do not read their responses, would use up file
descriptors and memory.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.api.schemas import RequestRejected
from farm.client import serialization
from farm.client.http_errors import ProblemDetails


def _descriptors() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`request_s` applies to the head of a request, to each piece of its body, and to each piece of a response that the
    client reads; `body_s` to a complete body. `max_held_bytes` applies to all requests in progress together.
    """

    request_s: float = 30.0
    body_s: float = 600.0
    max_held_bytes: int = 2 * serialization.MAX_BODY_BYTES
    max_connections: int = field(default_factory=lambda: max(64, min(8192, _descriptors() - 256)))


_TOO_MUCH = ProblemDetails(503, "Overloaded", "too many large requests at once: try again")


class TimedConnection(H11Protocol):
    """One connection, closed if there are too many, if the head of a request is not complete in time, or if the client
    reads nothing of a response for as long.
    """

    def __init__(self, bounds: ConnectionLimits, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(True)
        if len(self.connections) > self._bounds.max_connections:
            transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _look_unread(self, n_bytes: int) -> None:
        """Abort the connection unless the client read some of these unread bytes of a response within `request_s`."""
        self._forget_unread()
        self._unread = self.loop.call_later(self._bounds.request_s, self._still_unread, n_bytes)

    def _still_unread(self, n_before: int) -> None:
        n_bytes = self.transport.get_write_buffer_size()
        if n_bytes >= n_before:
            if (connection := self.transport.get_extra_info("socket")) is not None:
                # else the kernel would keep the unread data for minutes
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._look_unread(n_bytes)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(self._is_begun())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self._is_begun())

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        self._forget_unread()
        super().connection_lost(exc)

    def _is_begun(self) -> bool:
        """Return whether a request is incomplete; between requests, uvicorn limits how long a connection is kept."""
        waits = self.conn.their_state is h11.IDLE
        return waits and (self.cycle is None or bool(self.conn.trailing_data[0]))

    def _watch(self, waits: bool) -> None:
        """Start or stop the timer for the head of a request."""
        if waits and self._timer is None:
            self._timer = self.loop.call_later(self._bounds.request_s, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RequestBodyLimit:
    """Refuses a request whose body stalls, and one that would exceed the limit of held bytes."""

    def __init__(self, app: ASGIApp, bounds: ConnectionLimits) -> None:
        self._app = app
        self._bounds = bounds
        self._n_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n_mine, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._bounds.body_s

        async def bounded() -> Message:
            nonlocal n_mine, is_whole
            if is_whole:
                # after the body, the only message left is the client's disconnect
                return await receive()
            soon = asyncio.get_running_loop().time() + self._bounds.request_s
            try:
                async with asyncio.timeout_at(min(soon, deadline)):
                    message = await receive()
            except TimeoutError:
                if soon < deadline:
                    slow = f"no more of it came for {self._bounds.request_s:g} s"
                else:
                    slow = f"not all of it came in {self._bounds.body_s:g} s"
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

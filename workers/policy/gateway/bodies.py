"""What is read of requests, and how much at once: whoever asks shares the sandbox with the policy's own programs.

A worker plays many rollouts, and none of them may use up its memory.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.policy.gateway.wire import BadRequest, writable

MAX_BODY_BYTES = 16_000_000
MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
"""Of all requests of a rollout that are under way."""


_MAX_BRACKETS = 500_000
"""Each may be an object of Python, of many times its size; to make millions takes seconds in which nobody is served."""


class TooLarge(Exception):
    """More than is read."""


class Crowded(Exception):
    """Too much is under way already."""


class Bounded:
    """Holds back the requests of one rollout that together have too many bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._n_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n_mine = 0

        async def counted() -> Message:
            nonlocal n_mine
            message = await receive()
            n_bytes = len(message.get("body", b""))
            if self._n_held + n_bytes > MAX_HELD_BYTES:
                raise Crowded
            n_mine += n_bytes
            self._n_held += n_bytes
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._n_held -= n_mine


async def body_of(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest, TooLarge, Crowded, ClientDisconnect."""
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise TooLarge
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise TooLarge
    if data.count(b"[") + data.count(b"{") > _MAX_BRACKETS:
        raise TooLarge
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    if not writable(body):
        raise BadRequest("the request's JSON is nested too deep")
    return body

"""Answers of the double over HTTP, and that a client who goes away ends what was being done for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.testing.engine.asked import Refused
from workers.testing.engine.faults import STATUSES, Faults

T = TypeVar("T")
_CUT_AFTER_CHUNKS = 2
_KINDS = {"500": "InternalServerError", "429": "RateLimitError", "503": "ServiceUnavailableError"}


class Json(Response):
    """Numpy arrays are lists."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class ClientGone(Exception):
    """Nobody is there to take the answer."""


class EventStream(Response):
    """Server-sent events: each a JSON value, `[DONE]` at the end. The chunks are closed when the client goes away."""

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await send(_part(_event(orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY))))
        await send(_part(_event(b"[DONE]")))
        await send(_part(b"", last=True))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _part(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; it is cancelled when the client goes away. Raises ClientGone then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait((task, gone))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises Refused."""
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise Refused(f"Invalid JSON: {error}", kind="Bad Request") from None
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object", kind="Bad Request")
    return body


class Struck:
    """Middleware that lets faults strike the calls to some paths, but for those that only the wire can play.

    Those are put into the scope as `fault`. `error` writes an error as the wire does.
    """

    def __init__(
        self, app: ASGIApp, faults: Faults, paths: frozenset[str], error: Callable[[Refused], Response]
    ) -> None:
        self._app = app
        self._faults = faults
        self._paths = paths
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        struck = scope["type"] == "http" and scope["path"] in self._paths
        fault = self._faults.strike() if struck else ""
        if fault in STATUSES:
            await self._refusal(fault)(scope, receive, send)
        elif fault == "close":
            await _cut(scope, receive)
        elif fault == "garbage":
            await Response("<html>not what you asked for", media_type="application/json")(scope, receive, send)
        elif fault == "reset":
            await self._app(scope, receive, _CutOff(scope, receive, send))
        else:
            scope["fault"] = fault
            await self._app(scope, receive, send)

    def _refusal(self, fault: str) -> Response:
        status = STATUSES[fault]
        if fault == "502":
            return Response("<html><body><h1>502 Bad Gateway</h1></body></html>", status, media_type="text/html")
        response = self._error(Refused("a fault that was asked for", status=status, kind=_KINDS[fault]))
        if fault == "429":
            response.headers["retry-after"] = f"{self._faults.retry_after_s:g}"
        return response


class _CutOff:
    """Sends the head and half of the body, or a few chunks of a stream, then cuts the connection."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._n_chunks = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        whole = not message.get("more_body")
        data = message["body"]
        self._n_chunks += 1
        if self._n_chunks <= _CUT_AFTER_CHUNKS:
            await self._send(_part(data[: len(data) // 2] if whole else data))
        if whole or self._n_chunks >= _CUT_AFTER_CHUNKS:
            await _cut(self._scope, self._receive)


async def _cut(scope: Scope, receive: Receive) -> None:
    """Drop the connection, once what is written is out, as `workers.testing.serving` lets an application do."""
    scope["state"]["transport"].close()
    await _gone(receive)


class Guarded:
    """Middleware that wants a key on the paths that vLLM's `--api-key` guards, which are not all."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/v1", "/inference"))
        if guarded and dict(scope["headers"]).get(b"authorization") != self._expected:
            await Json({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

"""HTTP responses of the scripted engine, and the cancellation of requests whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from workers.testing.engine.model_request import RequestRefused

T = TypeVar("T")


class Json(Response):
    """A JSON response; numpy arrays become lists."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class ClientGone(Exception):
    """The client has disconnected before the response."""


class EventStream(Response):
    """Server-sent events: JSON values, then `[DONE]`. The chunks are closed when the client disconnects."""

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
                await send(body_part(_event(orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY))))
        await send(body_part(_event(b"[DONE]")))
        await send(body_part(b"", last=True))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def body_part(data: bytes, *, last: bool = False) -> Message:
    """Return the ASGI message of a part of a body."""
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, which is cancelled when the client disconnects. Raises ClientGone then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait((task, gone))


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> dict[str, Any]:
    """Return the request's JSON object. Raises RequestRefused."""
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"Invalid JSON: {error}", kind="Bad Request") from None
    if not isinstance(body, dict):
        raise RequestRefused("The body must be a JSON object", kind="Bad Request")
    return body

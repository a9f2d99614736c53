"""HTTP requests and responses of the scripted engine: sampling requests in a common form, and refusals of invalid ones.

A request whose client disconnects is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from farm.errors import FarmError
from farm.records.trajectory import TokenIds

RequestT = TypeVar("RequestT", bound=BaseModel)
T = TypeVar("T")


class RequestRefused(FarmError):
    """The request is answered with this status and error."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One prompt, sampled `n` times. `max_tokens` None means no limit; `seed` None leaves it to the source of turns."""

    request_id: str
    prompt: TokenIds
    max_tokens: int | None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    salt: str = ""

    def seed_of(self, index: int) -> int | None:
        return None if self.seed is None else self.seed + index


def parsed(model: type[RequestT], body: Any) -> RequestT:
    """Return the request. Raises RequestRefused, worded like vLLM, for an invalid one."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        lines = [f"  { ({**one, 'loc': _location(one)}) }" for one in errors]
        plural = "s" if len(errors) > 1 else ""
        message = "\n".join([f"{len(errors)} validation error{plural}:", *lines])
        raise RequestRefused(message, kind="Bad Request", param=_location(errors[0])) from None


def _location(error: Any) -> str:
    return ".".join(["body", *map(str, error["loc"])])


def ids_of(values: Any, size: int, refusal: str = "Token id {id} is out of vocabulary") -> TokenIds:
    """Return a list of token ids. Raises RequestRefused for other values, and for ids outside the vocabulary."""
    try:
        ids = np.array(values)
    except ValueError:
        ids = np.array(None)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise RequestRefused("token ids are a flat list of integers")
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if len(wrong):
        raise RequestRefused(refusal.format(id=ids[wrong[0]], size=size))
    return ids.astype(np.int32)


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

"""The HTTP side of the gateway: bodies and labels of requests, errors of the client's API, and streamed answers.

Bodies are limited in size, single and concurrent: clients share the sandbox with the policy's programs; a worker runs
many rollouts, and none of them may exhaust its memory. The status of an error tells whether to retry. Answers are
streamed while they are sampled; a disconnect of the client ends the sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.errors import LimitReached, RolloutError, StaleRollout
from farm.records.rollout import Outcome
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.model_api import MAX_DEPTH, Api, ApiProblem, BadRequest, Events, writable

MAX_BODY_BYTES = 16_000_000
MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
"""Bytes of all concurrent requests of a rollout."""


_MAX_BRACKETS = 500_000
"""Number of brackets in a body: each may become a Python object; millions block the event loop for seconds."""
_LABEL = "x-label-"
"""The prefix of header names that set labels, for programs written for the farm."""
_KNOWN = {
    "session_id": "session",
    "x-session-id": "session",
    "x-claude-code-session-id": "session",
    "conversation_id": "conversation",
    "x-openai-subagent": "subagent",
    "x-agent-id": "agent",
    "x-agent-name": "agent",
    "user-agent": "client",
}
_MAX_LABELS = 16
_MAX_CHARS = 200
log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
# Clients recognise the error by these words, some by one vendor's, some by another's.
_FULL = "This model's maximum context length is exceeded by the conversation: shorten it"
T = TypeVar("T")


class BodyTooLarge(Exception):
    """A request exceeds the size limit."""


class TooManyRequests(Exception):
    """The concurrent requests of a rollout exceed the size limit."""


class HeldBytesLimit:
    """An ASGI wrapper that limits the bytes of a rollout's concurrent requests; raises TooManyRequests."""

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
                raise TooManyRequests
            n_mine += n_bytes
            self._n_held += n_bytes
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._n_held -= n_mine


def _unpacked(data: bytes, encoding: str) -> bytearray:
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"encoding {encoding!r} is not supported: send the body uncompressed or as gzip", status=415)
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        whole = reader.decompress(data, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise BadRequest(f"the request's {encoding} data is corrupt: {error}") from None
    if len(whole) > MAX_BODY_BYTES:
        raise BodyTooLarge
    if not reader.eof:
        raise BadRequest(f"the request's {encoding} data is truncated")
    return bytearray(whole)


async def data_of(request: Request) -> bytearray:
    """Return the bytes of a request. Raises BodyTooLarge, TooManyRequests, ClientDisconnect."""
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise BodyTooLarge
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge
    return data


def encoding_of(request: Request) -> str:
    """Return the compression of a request's bytes; empty if uncompressed."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def body_in(data: bytearray, encoding: str) -> dict[str, Any]:
    """Return the JSON object of a request's bytes. Raises BadRequest, BodyTooLarge."""
    if encoding:
        data = _unpacked(bytes(data), encoding)
    if (n_brackets := data.count(b"[") + data.count(b"{")) > _MAX_BRACKETS:
        raise BodyTooLarge
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    if n_brackets > MAX_DEPTH and not writable(body):
        raise BadRequest("the request's JSON is nested too deeply")
    return body


def header_labels(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in a request's headers."""
    labels: dict[str, str] = {}
    for name, value in headers.items():
        label = _KNOWN.get(name) or (name.removeprefix(_LABEL) if name.startswith(_LABEL) else "")
        if label and value and len(labels) < _MAX_LABELS:
            labels[label[:64]] = value[:_MAX_CHARS]
    return labels


def problem_of(error: Exception) -> ApiProblem:
    """Return the error for the client, without engine addresses. Only a 503 should be retried."""
    if isinstance(error, BadRequest):
        return ApiProblem(error.status, "invalid_request", str(error), error.param, details=error.details)
    if isinstance(error, BodyTooLarge):
        return ApiProblem(
            413, "request_too_large", f"a request may have {MAX_BODY_BYTES} bytes, and not as many objects"
        )
    if isinstance(error, TooManyRequests):
        return ApiProblem(503, "overloaded", "too many requests at once", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, LimitReached) and error.outcome is Outcome.CONTEXT_FULL:
        return ApiProblem(400, "context_length_exceeded", _FULL, "messages")
    if isinstance(error, LimitReached | StaleRollout):
        # Not 400 or 429: some agents retry those.
        return ApiProblem(403, "rollout_ended", "the limits of this run are reached: no further request is answered")
    if isinstance(error, RolloutError) and error.retryable:
        return ApiProblem(503, "engine_error", "the model is not reachable now", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, RolloutError):
        return ApiProblem(400, "engine_refused", "the model refuses this request")
    log.error("Model call failed", exc_info=error)
    return ApiProblem(500, "internal_error", f"answering broke: {type(error).__name__}")


def forget_frames(error: BaseException | None) -> None:
    """Drop an error's frames, which hold its request: errors of unanswered calls are kept until the rollout ends."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def refusal(api: Api, problem: ApiProblem) -> Response:
    headers = {"x-should-retry": "true" if problem.status == 503 else "false"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(problem.retry_after_s)
    return json_response(api.problem(problem), problem.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


class _Any(ChatApi):
    """The API of a client with an unknown protocol: error bodies that clients of each API can read."""

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        return {"type": "error", **super().problem(problem)}


ANY = _Any()


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

"""Responses of the gateway: errors of the client's API, and answers that are streamed while they are sampled.

The status of an error tells whether to retry. A disconnect of the client ends the sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from farm.errors import LimitReached, RolloutError, StaleRollout
from farm.records.rollout import Outcome
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.model_api import Api, ApiProblem, BadRequest, Events
from workers.policy.gateway.request_limits import MAX_BODY_BYTES, BodyTooLarge, TooManyRequests

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1

# Clients recognise the error by these words, some by one vendor's, some by another's.
_FULL = "This model's maximum context length is exceeded by the conversation: shorten it"
T = TypeVar("T")


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

"""Faults between a server and its client: error statuses, broken connections, answers that are not JSON."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.doubles.double_machine import struck
from tests.doubles.faults import STATUSES, Faults
from workers.testing.engine.web import Json, RequestRefused, body_part, until_disconnected

_CUT_AFTER_CHUNKS = 2
_KINDS = {"500": "InternalServerError", "429": "RateLimitError", "503": "ServiceUnavailableError"}


class FaultMiddleware:
    """Middleware that injects faults into calls to some paths, except those that only the machine can inject.

    The latter are passed to the machine as `struck`. `error` formats an error of the wire.
    """

    def __init__(
        self, app: ASGIApp, faults: Faults, paths: frozenset[str], error: Callable[[RequestRefused], Response]
    ) -> None:
        self._app = app
        self._faults = faults
        self._paths = paths
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        samples = scope["type"] == "http" and scope["path"] in self._paths
        fault = self._faults.strike() if samples else ""
        if fault in STATUSES:
            await self._refusal(fault)(scope, receive, send)
        elif fault == "close":
            await _cut(scope, receive)
        elif fault == "garbage":
            await Response("<html>not the requested format", media_type="application/json")(scope, receive, send)
        elif fault == "reset":
            await self._app(scope, receive, _CutOff(scope, receive, send))
        else:
            struck.set(fault)
            await self._app(scope, receive, send)

    def _refusal(self, fault: str) -> Response:
        status = STATUSES[fault]
        if fault == "502":
            return Response("<html><body><h1>502 Bad Gateway</h1></body></html>", status, media_type="text/html")
        response = self._error(RequestRefused("a requested fault", status=status, kind=_KINDS[fault]))
        if fault == "429":
            response.headers["retry-after"] = f"{self._faults.retry_after_s:g}"
        return response


class _CutOff:
    """Sends the head and half of the body, or a few chunks of a stream, then breaks the connection."""

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
            await self._send(body_part(data[: len(data) // 2] if whole else data))
        if whole or self._n_chunks >= _CUT_AFTER_CHUNKS:
            await _cut(self._scope, self._receive)


async def _cut(scope: Scope, receive: Receive) -> None:
    """Drop the connection after the written data was sent, with the extension of `workers.testing.serving`."""
    scope["state"]["transport"].close()
    await until_disconnected(receive)


class ApiKeyMiddleware:
    """Middleware that requires a key on the paths that vLLM's `--api-key` protects, which are not all."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith(("/v1", "/inference"))
        if guarded and dict(scope["headers"]).get(b"authorization") != self._expected:
            await Json({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

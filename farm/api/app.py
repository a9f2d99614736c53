"""The API as a web application: all its routes, its server, which runs until a signal stops it, and its limits.

The number of connections, the time for requests and responses, and the bytes held are limited. Without these limits,
clients that send nothing or half a request, or do not read their responses, would use up file descriptors and memory.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope
from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.api import access_routes, batches, engines, openapi, protocols, sandbox_routes
from farm.api.auth import KeyMiddleware, KnownKeys, guarded
from farm.api.endpoints import (
    JSON,
    TEXT,
    ApiConfig,
    Endpoints,
    EndpointTable,
    Examine,
    ListPage,
    allowed_methods,
    no_findings,
    page_after,
    refusal,
)
from farm.api.protocols import PAGE, ProtocolSwitch, SpokenProtocol
from farm.api.schemas import AfterQuery, OneNode, RequestRejected
from farm.callers import Scope
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.client.local import LocalFarm
from farm.errors import InvalidRequest
from farm.records.node import Node

_TOO_MUCH = ProblemDetails(503, "Overloaded", "too many large requests at once: retry")
_IDENTITY = {"name": "rollout farm", "version": version("rollout-farm"), "description": "/openapi.json"}
Page = Callable[[Endpoints, KnownKeys], ASGIApp]
"""A function that makes the web page from endpoints and keys; it is served below /web/, with its own sign-in."""
WAIT_TIMEOUT_S = 5.0
"""Seconds to wait for an unavailable database, as it blocks a thread; then the client gets an error and retries."""
_GRACE_PERIOD_S = 10
"""Seconds for requests in flight to finish when the process ends."""
_LAST_ANSWERS_S = 2
"""Seconds to write the answers of those that did not finish."""
# longer than clients keep an unused connection, else they find it closed at their next request
_KEEP_ALIVE_S = 75


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

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
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


def application(
    endpoints: Endpoints,
    key: str,
    bounds: ConnectionLimits,
    speak: Sequence[SpokenProtocol] = (),
    page: Page | None = None,
) -> ASGIApp:
    """Return the API's ASGI application, with other protocols, the page, authentication and connection limits."""
    keys = KnownKeys(endpoints, key)
    apps = [
        (each, KeyMiddleware(protocols.application(endpoints, each.protocol), keys, each.protocol.refuse))
        for each in speak
    ]
    by_name = {each.name: app for each, app in apps} | ({} if page is None else {PAGE: page(endpoints, keys)})
    by_port = {each.port: app for each, app in apps if each.port}
    open_paths = [path for (_, path), endpoint in ENDPOINTS.items() if endpoint.scope is None]
    own = KeyMiddleware(_own_verbs(endpoints), keys, open_paths=open_paths)
    return RequestBodyLimit(ProtocolSwitch(own, by_name, by_port), bounds)


ENDPOINTS = EndpointTable()


@ENDPOINTS.add("GET", "/", "Name and version.", Scope.READ)
def identity() -> dict[str, str]:
    return _IDENTITY


@ENDPOINTS.add("GET", "/openapi.json", "This description.", Scope.READ, returns=dict[str, Any])
def described() -> Response:
    return Response(_description(), media_type=JSON)


@cache
def _description() -> bytes:
    # made on first use, as it takes a quarter of a second
    return serialization.written(openapi.description(ENDPOINTS))


@ENDPOINTS.add("GET", "/healthz", "Tells that this process is alive; needs no key.", None)
async def alive() -> dict[str, str]:
    # answered on the event loop, as other requests may occupy all threads
    return {"status": "ok"}


@ENDPOINTS.add("GET", "/readyz", "Tells if the database and the broker answer; needs no key.", None)
async def ready(endpoints: Endpoints) -> dict[str, str]:
    await endpoints.check_health()
    return {"status": "ok"}


@ENDPOINTS.add("GET", "/metrics", "The farm's numbers for Prometheus.", Scope.READ, returns=str, media_type=TEXT)
def numbers(endpoints: Endpoints) -> Response:
    return Response(generate_latest(endpoints.metrics), media_type=CONTENT_TYPE_LATEST)


@ENDPOINTS.add("GET", "/v1/doctor", "The findings of `farm doctor`.", Scope.READ)
def findings(endpoints: Endpoints) -> list[dict[str, Any]]:
    return list(endpoints.examine())


@ENDPOINTS.add("GET", "/v1/nodes", "The nodes.", Scope.READ)
def nodes(farm: LocalFarm, query: AfterQuery) -> ListPage[Node]:
    return page_after(farm.nodes(), query.limit, query.after, lambda node: node.node)


@ENDPOINTS.add("POST", "/v1/nodes/drain", "Drain a node, which then exits.", Scope.OPERATE)
def drain_node(farm: LocalFarm, body: OneNode) -> dict[str, str]:
    farm.drain_node(body.node)
    return {}


for _module in (batches, engines, sandbox_routes, access_routes):
    ENDPOINTS.update(_module.ENDPOINTS)


def _own_verbs(endpoints: Endpoints) -> ASGIApp:
    scopes = {route: endpoint.scope for route, endpoint in ENDPOINTS.items()}
    inner = Starlette(
        routes=guarded(endpoints.routes(ENDPOINTS), scopes, refusal),
        exception_handlers={404: _not_there, 405: _not_so},
    )
    inner.router.redirect_slashes = False
    return inner


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(ProblemDetails(404, "NotFound", f"there is no {ascii(request.url.path)[1:-1][:200]}"))


async def _not_so(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ProblemDetails(405, "NotAllowed", f"not by {ascii(request.method)[1:-1][:20]}")
    return refusal(problem, allowed_methods(request))


_BOUNDS = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its key, as PEM files."""

    certificate: str
    key: str

    def check(self) -> None:
        """Raise InvalidRequest unless they are readable and belong together."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key, "")
        except (OSError, ssl.SSLError) as error:
            files = f"{self.certificate} and {self.key} are not a certificate and its key without a passphrase"
            raise InvalidRequest(f"{files}: {error}", field="--tls-cert") from None


class ApiServer(uvicorn.Server):
    """A server that reports when it listens, and answers all waiting requests when it ends."""

    def __init__(
        self,
        endpoints: Endpoints,
        key: str,
        listening: Callable[[], None],
        bounds: ConnectionLimits = _BOUNDS,
        speak: Sequence[SpokenProtocol] = (),
        tls: TlsFiles | None = None,
        page: Page | None = None,
    ) -> None:
        config = uvicorn.Config(
            application(endpoints, key, bounds, speak, page),
            http=partial(TimedConnection, bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            # uvicorn would log each malformed request
            log_level="error",
            # the process's own handlers log them
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_PERIOD_S,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        super().__init__(config)
        self._endpoints = endpoints
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._endpoints.close()
        await super().shutdown(sockets)
        # cancelled requests are answered, too, and uvicorn does not wait for that
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_LAST_ANSWERS_S)


def serve(
    farm: LocalFarm,
    config: ApiConfig,
    listeners: Sequence[socket.socket],
    key: str,
    listening: Callable[[], None],
    examine: Examine = no_findings,
    speak: Sequence[SpokenProtocol] = (),
    tls: TlsFiles | None = None,
    page: Page | None = None,
) -> None:
    """Serve until a signal stops it; requests in flight are still answered.

    `examine` makes the answer of `/v1/doctor`; `listeners` include those of `speak`.
    """
    ApiServer(Endpoints(farm, config, examine), key, listening, speak=speak, tls=tls, page=page).run(
        sockets=list(listeners)
    )

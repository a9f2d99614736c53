"""Protocols of other systems that the API supports in addition to its own: each a folder here, found by entry point.

A protocol is served below `/NAME/`, and at the root of a port of its own. Its requests use the same keys and the same
limits and change the same store; its errors have the form that its own clients read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.auth import RouteScopes, guarded
from farm.api.endpoints import Endpoints, Refuse, allowed_methods
from farm.client.http_errors import ProblemDetails
from farm.plugins import load

PROTOCOLS = "farm.protocols"
"""The group of their entry points."""
PAGE = "web"
"""The first part of the paths of the web page, which no protocol may be named after."""


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """The routes of a protocol, its form of an error, and the scope of each route by (method, path)."""

    routes: Callable[[Endpoints], Sequence[BaseRoute]]
    refuse: Refuse
    scopes: RouteScopes


@dataclass(frozen=True, slots=True)
class SpokenProtocol:
    """A protocol that is served, by name; also at the root of `port`, if that is not 0."""

    name: str
    protocol: WireProtocol
    port: int = 0


def spoken(name: str, port: int = 0) -> SpokenProtocol:
    """Return an installed protocol. Raises NotFound, with the known names."""
    return SpokenProtocol(name, cast(WireProtocol, load(PROTOCOLS, name)), port)


def application(endpoints: Endpoints, protocol: WireProtocol) -> ASGIApp:
    """Return the ASGI application of one protocol."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "NotFound" if error.status_code == 404 else "NotAllowed"
        place = f"{request.method} {request.url.path}"
        problem = ProblemDetails(error.status_code, kind, f"there is no {ascii(place)[1:-1][:200]}")
        return protocol.refuse(problem, allowed_methods(request))

    routes = guarded(protocol.routes(endpoints.refusing(protocol.refuse)), protocol.scopes, protocol.refuse)
    inner = Starlette(routes=routes, exception_handlers={404: refuse, 405: refuse})
    inner.router.redirect_slashes = False
    return inner


class ProtocolSwitch:
    """Passes a request to the protocol of its port or of the first part of its path, else to the API's own routes."""

    def __init__(self, own: ASGIApp, by_name: Mapping[str, ASGIApp], by_port: Mapping[int, ASGIApp]) -> None:
        self._own = own
        self._by_name = by_name
        self._by_port = by_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, port = scope.get("server") or ("", 0)
        if (app := self._by_port.get(port)) is not None:
            await app(scope, receive, send)
            return
        if scope["path"] in ("/", f"/{PAGE}") and PAGE in self._by_name and _is_browser(scope):
            await RedirectResponse(f"/{PAGE}/", 303)(scope, receive, send)
            return
        name = scope["path"].removeprefix("/").partition("/")[0]
        if (app := self._by_name.get(name)) is not None:
            scope = {**scope, "path": scope["path"][len(name) + 1 :] or "/"}
            await app(scope, receive, send)
            return
        await self._own(scope, receive, send)


def _is_browser(scope: Scope) -> bool:
    """Return whether a request asks for a page."""
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])

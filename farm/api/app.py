"""The API as a web application: all its routes, and the answer for unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from farm import metrics
from farm.api import access_routes, batches, engines, openapi, protocols, sandbox_routes
from farm.api.auth import KeyMiddleware, KnownKeys
from farm.api.connections import ConnectionLimits, RequestBodyLimit
from farm.api.endpoints import Endpoints, ListPage, allowed_methods, page_after, refusal
from farm.api.openapi import TEXT, Described, EndpointDescription
from farm.api.protocols import PAGE, ProtocolSwitch, SpokenProtocol
from farm.api.schemas import AfterQuery, ApiRequest, OneNode
from farm.api.scopes import guarded
from farm.callers import Scope
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.records.node import Node
from farm.settings import settings

ENDPOINTS: Described = {
    ("GET", "/"): EndpointDescription("Name and version.", dict[str, str], scope=Scope.READ),
    ("GET", "/openapi.json"): EndpointDescription("This description.", dict[str, Any], scope=Scope.READ),
    ("GET", "/healthz"): EndpointDescription(
        "Tells that this process is alive; needs no key.", dict[str, str], scope=None
    ),
    ("GET", "/readyz"): EndpointDescription(
        "Tells if the database and the broker answer; needs no key.", dict[str, str], scope=None
    ),
    ("GET", "/metrics"): EndpointDescription(
        "The farm's numbers for Prometheus.", str, media_type=TEXT, scope=Scope.READ
    ),
    ("GET", "/v1/doctor"): EndpointDescription(
        "The findings of `farm doctor`.", list[dict[str, Any]], scope=Scope.READ
    ),
    ("GET", "/v1/nodes"): EndpointDescription("The nodes.", list[Node], AfterQuery, scope=Scope.READ),
    ("POST", "/v1/nodes/drain"): EndpointDescription(
        "Drain a node, which then exits.", dict[str, str], body=OneNode, scope=Scope.OPERATE
    ),
    **batches.ENDPOINTS,
    **engines.ENDPOINTS,
    **sandbox_routes.ENDPOINTS,
    **access_routes.ENDPOINTS,
}


Page = Callable[[Endpoints, KnownKeys], ASGIApp]
"""A function that makes the web page from endpoints and keys; it is served below /web/, with its own sign-in."""


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
    open_paths = [path for (_, path), described in ENDPOINTS.items() if described.scope is None]
    own = KeyMiddleware(_own_verbs(endpoints), keys, open_paths=open_paths)
    return RequestBodyLimit(ProtocolSwitch(own, by_name, by_port), bounds)


def _own_verbs(endpoints: Endpoints) -> ASGIApp:
    numbers = metrics.registry(endpoints.farm.store, settings().node_timeout_s)
    name = {"name": "rollout farm", "version": version("rollout-farm"), "description": "/openapi.json"}

    def nodes(request: ApiRequest) -> ListPage:
        query = request.parse_query(AfterQuery)
        return page_after(endpoints.farm.nodes(), query.limit, query.after, lambda node: node.node)

    def drain(request: ApiRequest) -> dict[str, str]:
        endpoints.farm.drain_node(request.parse_body(OneNode).node)
        return {}

    @cache
    def described() -> bytes:
        # imported on first use, as it takes a quarter of a second
        return serialization.written(openapi.description(ENDPOINTS))

    scopes = {place: each.scope for place, each in ENDPOINTS.items()}
    inner = Starlette(
        routes=guarded(
            [
                endpoints.get("/", lambda request: name),
                endpoints.get("/openapi.json", lambda request: Response(described(), media_type="application/json")),
                endpoints.get(
                    "/metrics", lambda request: Response(generate_latest(numbers), media_type=CONTENT_TYPE_LATEST)
                ),
                endpoints.route("GET", "/healthz", _alive),
                endpoints.health("/readyz"),
                *batches.routes(endpoints),
                *engines.routes(endpoints),
                *access_routes.routes(endpoints),
                *sandbox_routes.routes(endpoints),
                endpoints.get("/v1/doctor", lambda request: list(endpoints.examine())),
                endpoints.get("/v1/nodes", nodes),
                endpoints.post("/v1/nodes/drain", drain),
            ],
            scopes,
            refusal,
        ),
        exception_handlers={404: _not_there, 405: _not_so},
    )
    inner.router.redirect_slashes = False
    return inner


async def _alive(request: ApiRequest) -> dict[str, str]:
    """Answer on the event loop, as other requests may occupy all threads."""
    return {"status": "ok"}


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(ProblemDetails(404, "NotFound", f"there is no {ascii(request.url.path)[1:-1][:200]}"))


async def _not_so(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ProblemDetails(405, "NotAllowed", f"not by {ascii(request.method)[1:-1][:20]}")
    return refusal(problem, allowed_methods(request))

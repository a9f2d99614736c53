"""The API as a web application: all its routes, and the answer where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from farm import metrics
from farm.api import archive_routes, batches, engines, openapi, protocols, rollouts, runs
from farm.api.auth import HEALTH, KeyMiddleware
from farm.api.connections import ConnectionLimits, RequestBodyLimit
from farm.api.endpoints import Endpoints, refusal
from farm.api.openapi import TEXT, Described, EndpointDescription
from farm.api.protocols import ProtocolSwitch, SpokenProtocol
from farm.client.http_errors import ProblemDetails
from farm.records.node import Node
from farm.settings import settings

ENDPOINTS: Described = {
    ("GET", "/"): EndpointDescription("Name and version.", dict[str, str]),
    ("GET", "/openapi.json"): EndpointDescription("This description.", dict[str, Any]),
    ("GET", "/healthz"): EndpointDescription("Whether the database answers; asked without a key, too.", dict[str, str]),
    ("GET", "/metrics"): EndpointDescription("The farm's numbers for Prometheus.", str, media_type=TEXT),
    ("GET", "/v1/doctor"): EndpointDescription(
        "What is missing in the farm, as `farm doctor` says it.", list[dict[str, Any]]
    ),
    ("GET", "/v1/nodes"): EndpointDescription("The nodes.", list[Node]),
    **batches.ENDPOINTS,
    **rollouts.ENDPOINTS,
    **runs.ENDPOINTS,
    **archive_routes.ENDPOINTS,
    **engines.ENDPOINTS,
}


def application(
    endpoints: Endpoints, key: str, bounds: ConnectionLimits, speak: Sequence[SpokenProtocol] = ()
) -> ASGIApp:
    """Return the API's ASGI application, with other protocols, authentication and connection limits."""
    apps = [
        (each, KeyMiddleware(protocols.application(endpoints, each.protocol), key, each.protocol.refuse))
        for each in speak
    ]
    by_name = {each.name: app for each, app in apps}
    by_port = {each.port: app for each, app in apps if each.port}
    own = KeyMiddleware(_own_verbs(endpoints), key, open_path=HEALTH)
    return RequestBodyLimit(ProtocolSwitch(own, by_name, by_port), bounds)


def _own_verbs(endpoints: Endpoints) -> ASGIApp:
    numbers = metrics.registry(endpoints.farm.store, settings().node_timeout_s)
    name = {"name": "rollout farm", "version": version("rollout-farm"), "description": "/openapi.json"}
    inner = Starlette(
        routes=[
            endpoints.get("/", lambda request: name),
            endpoints.get("/openapi.json", lambda request: openapi.description(ENDPOINTS)),
            endpoints.get(
                "/metrics", lambda request: Response(generate_latest(numbers), media_type=CONTENT_TYPE_LATEST)
            ),
            endpoints.health(HEALTH),
            *batches.routes(endpoints),
            *rollouts.routes(endpoints),
            *runs.routes(endpoints),
            *archive_routes.routes(endpoints),
            *engines.routes(endpoints),
            endpoints.get("/v1/doctor", lambda request: list(endpoints.examine())),
            endpoints.get("/v1/nodes", lambda request: endpoints.farm.nodes()),
        ],
        exception_handlers={404: _not_there, 405: _not_so},
    )
    inner.router.redirect_slashes = False
    return inner


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(ProblemDetails(404, "NotFound", f"there is no {ascii(request.url.path)[1:-1][:200]}"))


async def _not_so(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ProblemDetails(405, "NotAllowed", f"not by {ascii(request.method)[1:-1][:20]}")
    return refusal(problem, headers=error.headers)

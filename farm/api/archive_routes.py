"""Task archives over HTTP: uploaded in parts, by digest."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NoBase64

from starlette.routing import Route

from farm.api.endpoints import Endpoints
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import ApiRequest, ArchiveEnd, ArchivePart
from farm.callers import Scope
from farm.client.archive_uploads import ArchiveState
from farm.errors import InvalidRequest

ENDPOINTS: Described = {
    ("GET", "/v1/archives/{digest}"): EndpointDescription(
        "How much of a task archive is there.", ArchiveState, scope=Scope.READ
    ),
    ("POST", "/v1/archives/{digest}/parts"): EndpointDescription(
        "Store a part of a task archive, in base64.", ArchiveState, body=ArchivePart, scope=Scope.SUBMIT
    ),
    ("POST", "/v1/archives/{digest}"): EndpointDescription(
        "Check that a task archive is whole and sound; then instances may name it.",
        ArchiveState,
        body=ArchiveEnd,
        scope=Scope.SUBMIT,
    ),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of task archives."""
    archives = endpoints.farm.archives

    def put_part(request: ApiRequest) -> ArchiveState:
        body = request.parse_body(ArchivePart)
        try:
            data = b64decode(body.data, validate=True)
        except (NoBase64, ValueError):
            raise InvalidRequest("is not base64", field="data") from None
        archives.put_part(_digest(request), body.number, data)
        return ArchiveState(False, (body.number,))

    def complete(request: ApiRequest) -> ArchiveState:
        archives.complete(_digest(request), request.parse_body(ArchiveEnd).n_parts)
        return ArchiveState(True)

    return [
        endpoints.get("/v1/archives/{digest}", lambda request: archives.state(_digest(request))),
        endpoints.post("/v1/archives/{digest}/parts", put_part),
        endpoints.post("/v1/archives/{digest}", complete),
    ]


def _digest(request: ApiRequest) -> str:
    return request.path["digest"]

"""Rollouts over HTTP: state, transcript, scores, artefacts, and annotations of trainers."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from farm.api.endpoints import Endpoints
from farm.api.list_pages import ListPage, list_page
from farm.api.openapi import BYTES, Described, EndpointDescription
from farm.api.schemas import ApiRequest, ArtefactQuery, CallsQuery
from farm.callers import Scope
from farm.records.rollout import KeptArtefact, Reward, Rollout, Timing
from farm.records.scoring.annotation import Annotation, NewAnnotations
from farm.records.trajectory import ModelCall

_UNTRUSTED = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
"""Written by the policy: no browser may interpret it as a page of the farm."""


ENDPOINTS: Described = {
    ("GET", "/v1/rollouts/{id}"): EndpointDescription("A rollout, without training rows.", Rollout, scope=Scope.READ),
    ("GET", "/v1/rollouts/{id}/calls"): EndpointDescription(
        "Its model calls.", list[ModelCall], CallsQuery, scope=Scope.READ
    ),
    ("GET", "/v1/rollouts/{id}/timings"): EndpointDescription(
        "Every stage of every attempt.", list[Timing], scope=Scope.READ
    ),
    ("GET", "/v1/rollouts/{id}/rewards"): EndpointDescription(
        "Its scores, newest last.", list[Reward], scope=Scope.READ
    ),
    ("GET", "/v1/rollouts/{id}/annotations"): EndpointDescription(
        "Figures that trainers wrote about it.", list[Annotation], scope=Scope.READ
    ),
    ("POST", "/v1/annotations"): EndpointDescription(
        "Write a trainer's figures about rollouts.", int, body=NewAnnotations, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
    ("GET", "/v1/rollouts/{id}/artefacts"): EndpointDescription(
        "Artefacts that are kept.", list[KeptArtefact], scope=Scope.READ
    ),
    ("GET", "/v1/rollouts/{id}/artefact"): EndpointDescription(
        "The bytes of an artefact.", bytes, ArtefactQuery, media_type=BYTES, scope=Scope.READ
    ),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of `/v1/rollouts`, and of annotations."""
    farm = endpoints.farm

    def artefact(request: ApiRequest) -> Response:
        data = farm.artefact(_id(request), request.parse_query(ArtefactQuery).name)
        return Response(data, headers=_UNTRUSTED, media_type="application/octet-stream")

    def calls(request: ApiRequest) -> ListPage:
        query = request.parse_query(CallsQuery)
        later = [call for call in farm.calls(_id(request)) if query.after is None or call.index > query.after]
        return list_page(later[: query.limit], query.limit, "after", lambda call: call.index)

    def annotate(request: ApiRequest) -> int:
        new = request.parse_body(NewAnnotations)
        return farm.annotations.write(new.producer, new.step, new.annotations)

    return [
        endpoints.get("/v1/rollouts/{id}/annotations", lambda request: farm.annotations.of(_id(request))),
        endpoints.post("/v1/annotations", annotate),
        endpoints.get("/v1/rollouts/{id}", lambda request: farm.rollout(_id(request))),
        endpoints.get("/v1/rollouts/{id}/calls", calls),
        endpoints.get("/v1/rollouts/{id}/timings", lambda request: farm.timings(_id(request))),
        endpoints.get("/v1/rollouts/{id}/rewards", lambda request: farm.rewards(_id(request))),
        endpoints.get("/v1/rollouts/{id}/artefacts", lambda request: farm.artefacts(_id(request))),
        endpoints.get("/v1/rollouts/{id}/artefact", artefact),
    ]


def _id(request: ApiRequest) -> str:
    return request.path["id"]

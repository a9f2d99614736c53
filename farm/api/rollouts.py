"""Rollouts over HTTP: how each stands, what it did, how it was scored, what it made."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from farm.api.desk import Desk
from farm.api.questions import Artefact, Question

_UNTRUSTED = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
"""The policy wrote it: no browser should take it for a page of the farm's."""


def routes(desk: Desk) -> list[Route]:
    """`/v1/rollouts`; all of it is read-only."""
    service = desk.service

    def artefact(asked: Question) -> Response:
        data = service.artefact(_id(asked), asked.queried(Artefact).name)
        return Response(data, headers=_UNTRUSTED, media_type="application/octet-stream")

    return [
        desk.get("/v1/rollouts/{id}", lambda asked: service.rollout(_id(asked))),
        desk.get("/v1/rollouts/{id}/calls", lambda asked: service.calls(_id(asked))),
        desk.get("/v1/rollouts/{id}/timings", lambda asked: service.timings(_id(asked))),
        desk.get("/v1/rollouts/{id}/rewards", lambda asked: service.rewards(_id(asked))),
        desk.get("/v1/rollouts/{id}/artefacts", lambda asked: service.artefacts(_id(asked))),
        desk.get("/v1/rollouts/{id}/artefact", artefact),
    ]


def _id(asked: Question) -> str:
    return asked.path["id"]

"""Batches over HTTP: submitted, counted, followed to their ends, acknowledged, cancelled, scored again."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import (
    Acknowledgement,
    ApiRequest,
    ConsumerQuery,
    EndedQuery,
    OpenQuery,
    RecentQuery,
    RolloutSelection,
)
from farm.client.consumer_stream import Page
from farm.client.remote import Submitted
from farm.records.conservation import Conservation, Violation
from farm.records.request import BatchRequest
from farm.records.rollout import BatchStatus, BatchSummary, Rollout, StageTimes

ENDPOINTS: Described = {
    ("POST", "/v1/batches"): EndpointDescription("Start a batch.", Submitted, body=BatchRequest),
    ("GET", "/v1/batches"): EndpointDescription("The newest batches.", list[BatchSummary], query=RecentQuery),
    ("GET", "/v1/batches/{id}"): EndpointDescription("A batch in numbers.", BatchStatus),
    ("GET", "/v1/batches/{id}/rollouts"): EndpointDescription("Its rollouts, without training rows.", list[Rollout]),
    ("GET", "/v1/batches/{id}/ended"): EndpointDescription(
        "A page of rollouts, or of whole groups, that ended after a cursor, with training rows.",
        Page,
        EndedQuery,
    ),
    ("GET", "/v1/batches/{id}/open"): EndpointDescription("Whether some have not ended.", bool, OpenQuery),
    ("GET", "/v1/batches/{id}/acknowledged"): EndpointDescription("A consumer's cursor.", int, ConsumerQuery),
    ("POST", "/v1/batches/{id}/acknowledged"): EndpointDescription(
        "Move a consumer's cursor on.", int, body=Acknowledgement
    ),
    ("GET", "/v1/batches/{id}/conservation"): EndpointDescription(
        "Submitted against ended and in flight.", Conservation
    ),
    ("GET", "/v1/batches/{id}/violations"): EndpointDescription("Invariants that are broken.", list[Violation]),
    ("GET", "/v1/batches/{id}/stage_times"): EndpointDescription(
        "Queueing and working times by stage.", list[StageTimes]
    ),
    ("POST", "/v1/cancel"): EndpointDescription("End a batch, a group or a rollout.", list[str], body=RolloutSelection),
    ("POST", "/v1/rescore"): EndpointDescription("Score again what was played.", list[str], body=RolloutSelection),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of `/v1/batches`, and of the two verbs that take any id."""
    farm = endpoints.farm

    def acknowledge(request: ApiRequest) -> int:
        acknowledgement = request.parse_body(Acknowledgement)
        return farm.acknowledge_up_to(_id(request), acknowledgement.cursor, acknowledgement.consumer)

    def ended(request: ApiRequest) -> LongPoll:
        wanted = request.parse_query(EndedQuery)
        page = partial(farm.page, _id(request), wanted.cursor, wanted.groups, wanted.limit)
        return LongPoll(_id(request), page, lambda page: page.settled, wanted.wait_s)

    def is_open(request: ApiRequest) -> LongPoll:
        has_open = partial(farm.has_open, _id(request))
        return LongPoll(_id(request), has_open, lambda is_open: not is_open, request.parse_query(OpenQuery).wait_s)

    def cancel(request: ApiRequest) -> list[str]:
        acknowledgement = request.parse_body(RolloutSelection)
        return farm.cancel(acknowledgement.id, acknowledgement.rollout_ids)

    def rescore(request: ApiRequest) -> list[str]:
        acknowledgement = request.parse_body(RolloutSelection)
        return farm.rescore(acknowledgement.id, acknowledgement.rollout_ids)

    return [
        endpoints.post("/v1/batches", lambda request: {"batch_id": farm.submit(request.body)}),
        endpoints.get("/v1/batches", lambda request: farm.batches(request.parse_query(RecentQuery).limit)),
        endpoints.get("/v1/batches/{id}", lambda request: farm.status(_id(request))),
        endpoints.get("/v1/batches/{id}/rollouts", lambda request: farm.rollouts(_id(request))),
        endpoints.poll("/v1/batches/{id}/ended", ended),
        endpoints.poll("/v1/batches/{id}/open", is_open),
        endpoints.get(
            "/v1/batches/{id}/acknowledged",
            lambda request: farm.acknowledged(_id(request), request.parse_query(ConsumerQuery).consumer),
        ),
        endpoints.post("/v1/batches/{id}/acknowledged", acknowledge),
        endpoints.get("/v1/batches/{id}/conservation", lambda request: farm.conservation(_id(request))),
        endpoints.get("/v1/batches/{id}/violations", lambda request: farm.violations(_id(request))),
        endpoints.get("/v1/batches/{id}/stage_times", lambda request: farm.stage_times(_id(request))),
        endpoints.post("/v1/cancel", cancel),
        endpoints.post("/v1/rescore", rescore),
    ]


def _id(request: ApiRequest) -> str:
    return request.path["id"]

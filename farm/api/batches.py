"""Batches over HTTP: submit, progress, results, acknowledgement, cancel, rescore."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.routing import Route

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.event_stream import EventStreams
from farm.api.list_pages import ListPage, list_page
from farm.api.openapi import EVENTS, Described, EndpointDescription
from farm.api.protocols import PROTOCOLS
from farm.api.schemas import (
    Acknowledgement,
    AfterQuery,
    ApiRequest,
    ConsumerQuery,
    EndedQuery,
    EventQuery,
    OpenQuery,
    RecentQuery,
    RolloutSelection,
)
from farm.callers import Scope
from farm.client.consumer_stream import Page
from farm.client.remote import Submitted
from farm.errors import InvalidRequest
from farm.plugins import installed
from farm.records.conservation import Conservation, Violation
from farm.records.request import BatchRequest
from farm.records.rollout import BatchStatus, BatchSummary, Rollout, StageTimes

ENDPOINTS: Described = {
    ("POST", "/v1/batches"): EndpointDescription("Start a batch.", Submitted, body=BatchRequest, scope=Scope.SUBMIT),
    ("GET", "/v1/batches"): EndpointDescription(
        "The newest batches.", list[BatchSummary], query=RecentQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}"): EndpointDescription("A batch in numbers.", BatchStatus, scope=Scope.READ),
    ("GET", "/v1/batches/{id}/rollouts"): EndpointDescription(
        "Its rollouts, without training rows, page by page.", list[Rollout], AfterQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/events"): EndpointDescription(
        "Its rollouts, or whole groups, as they end, as server-sent events; Last-Event-ID goes on after one.",
        str,
        EventQuery,
        media_type=EVENTS,
        scope=Scope.READ,
    ),
    ("GET", "/v1/batches/{id}/ended"): EndpointDescription(
        "A page of rollouts, or of whole groups, that ended after a cursor, with training rows.",
        Page,
        EndedQuery,
        scope=Scope.READ,
    ),
    ("GET", "/v1/batches/{id}/open"): EndpointDescription(
        "Whether some have not ended.", bool, OpenQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/acknowledged"): EndpointDescription(
        "A consumer's cursor.", int, ConsumerQuery, scope=Scope.READ
    ),
    ("POST", "/v1/batches/{id}/acknowledged"): EndpointDescription(
        "Move a consumer's cursor on.", int, body=Acknowledgement, scope=Scope.SUBMIT
    ),
    ("GET", "/v1/batches/{id}/conservation"): EndpointDescription(
        "Submitted against ended and in flight.", Conservation, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/violations"): EndpointDescription(
        "Invariants that are broken.", list[Violation], scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/stage_times"): EndpointDescription(
        "Queueing and working times by stage.", list[StageTimes], scope=Scope.READ
    ),
    ("POST", "/v1/cancel"): EndpointDescription(
        "End a batch, a group or a rollout.", list[str], body=RolloutSelection, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
    ("POST", "/v1/rescore"): EndpointDescription(
        "Score again what was played.", list[str], body=RolloutSelection, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
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

    def newest(request: ApiRequest) -> ListPage:
        query = request.parse_query(RecentQuery)
        return list_page(farm.batches(query.limit, query.before), query.limit, "before", lambda each: each.batch_id)

    def rollouts(request: ApiRequest) -> ListPage:
        query = request.parse_query(AfterQuery)
        page = farm.rollouts_after(_id(request), query.after, query.limit)
        return list_page(page, query.limit, "after", lambda each: each.rollout_id)

    def cancel(request: ApiRequest) -> list[str]:
        acknowledgement = request.parse_body(RolloutSelection)
        return farm.cancel(acknowledgement.id, acknowledgement.rollout_ids)

    def rescore(request: ApiRequest) -> list[str]:
        acknowledgement = request.parse_body(RolloutSelection)
        return farm.rescore(acknowledgement.id, acknowledgement.rollout_ids)

    return [
        endpoints.post("/v1/batches", lambda request: {"batch_id": farm.submit(_own_key(request.body))}),
        endpoints.get("/v1/batches", newest),
        endpoints.get("/v1/batches/{id}", lambda request: farm.status(_id(request))),
        endpoints.get("/v1/batches/{id}/rollouts", rollouts),
        endpoints.route("GET", "/v1/batches/{id}/events", EventStreams(endpoints).open),
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


def _own_key(body: Any) -> Any:
    """Return a submit request. Its key may not have a protocol's prefix, as a protocol's clients see all such batches.

    Raises InvalidRequest.
    """
    key = body.get("idempotency_key") if isinstance(body, dict) else None
    protocol, colon, _ = key.partition(":") if isinstance(key, str) else ("", "", "")
    if colon and protocol in installed(PROTOCOLS):
        raise InvalidRequest(f"must not begin with {protocol}:, the prefix of that protocol", field="idempotency_key")
    return body

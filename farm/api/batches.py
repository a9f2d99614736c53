"""Batches over HTTP, their rollouts, training runs, and task archives, which are uploaded in parts, by digest.

The id of a server-sent event is the consumer's cursor. So a client whose connection broke resumes at its own position,
at any API process, by Last-Event-ID, as EventSource in browsers and other clients of such streams do by themselves.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from binascii import Error as NoBase64
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from farm.api.endpoints import Endpoints, ListPage, LongPoll, list_page
from farm.api.openapi import BYTES, EVENTS, Described, EndpointDescription
from farm.api.protocols import PROTOCOLS
from farm.api.schemas import (
    Acknowledgement,
    AfterQuery,
    ApiRequest,
    ArchiveEnd,
    ArchivePart,
    ArtefactQuery,
    BatchKeys,
    CallsQuery,
    ConsumerQuery,
    EndedQuery,
    EventQuery,
    GroupIds,
    OpenQuery,
    RatesQuery,
    RecentQuery,
    RolloutSelection,
    StepQuery,
    StepRecord,
)
from farm.callers import Scope
from farm.client import serialization
from farm.client.consumer_stream import Page
from farm.client.http_errors import problem_of
from farm.client.remote import Submitted
from farm.client.verb_groups import ArchiveState
from farm.errors import FarmError, InvalidRequest, NotAllowed, ServiceError
from farm.plugins import installed
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import (
    BatchStatus,
    BatchSummary,
    Conservation,
    KeptArtefact,
    Reward,
    Rollout,
    StageTimes,
    Timing,
    Violation,
)
from farm.records.scoring.annotation import Annotation, NewAnnotations
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate
from farm.records.trajectory import ModelCall

_UNTRUSTED = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
"""Written by the policy: no browser may interpret it as a page of the farm."""
ENDPOINTS: Described = {
    ("POST", "/v1/batches"): EndpointDescription("Submit a batch.", Submitted, body=BatchRequest, scope=Scope.SUBMIT),
    ("GET", "/v1/batches"): EndpointDescription(
        "The newest batches.", list[BatchSummary], query=RecentQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}"): EndpointDescription("The progress of a batch.", BatchStatus, scope=Scope.READ),
    ("GET", "/v1/batches/{id}/rollouts"): EndpointDescription(
        "Its rollouts, without training rows, page by page.", list[Rollout], AfterQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/events"): EndpointDescription(
        "Its rollouts, or complete groups, as they end, as server-sent events; Last-Event-ID resumes after an event.",
        str,
        EventQuery,
        media_type=EVENTS,
        scope=Scope.READ,
    ),
    ("GET", "/v1/batches/{id}/ended"): EndpointDescription(
        "A page of rollouts, or of complete groups, that ended after a cursor, with training rows.",
        Page,
        EndedQuery,
        scope=Scope.READ,
    ),
    ("GET", "/v1/batches/{id}/open"): EndpointDescription(
        "Tells if a batch has open rollouts.", bool, OpenQuery, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/acknowledged"): EndpointDescription(
        "A consumer's cursor.", int, ConsumerQuery, scope=Scope.READ
    ),
    ("POST", "/v1/batches/{id}/acknowledged"): EndpointDescription(
        "Move a consumer's cursor on.", int, body=Acknowledgement, scope=Scope.SUBMIT
    ),
    ("GET", "/v1/batches/{id}/conservation"): EndpointDescription(
        "Counts of submitted, ended and in-flight rollouts.", Conservation, scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/violations"): EndpointDescription(
        "The violated invariants of a batch.", list[Violation], scope=Scope.READ
    ),
    ("GET", "/v1/batches/{id}/stage_times"): EndpointDescription(
        "Queueing and working times by stage.", list[StageTimes], scope=Scope.READ
    ),
    ("POST", "/v1/cancel"): EndpointDescription(
        "Cancel a batch, a group or a rollout.", list[str], body=RolloutSelection, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
    ("POST", "/v1/rescore"): EndpointDescription(
        "Score rollouts again.", list[str], body=RolloutSelection, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
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
        "The annotations that trainers wrote about it.", list[Annotation], scope=Scope.READ
    ),
    ("POST", "/v1/annotations"): EndpointDescription(
        "Write a trainer's annotations of rollouts.", int, body=NewAnnotations, scope=(Scope.SUBMIT, Scope.OPERATE)
    ),
    ("GET", "/v1/rollouts/{id}/artefacts"): EndpointDescription(
        "Its stored artefacts.", list[KeptArtefact], scope=Scope.READ
    ),
    ("GET", "/v1/rollouts/{id}/artefact"): EndpointDescription(
        "The bytes of an artefact.", bytes, ArtefactQuery, media_type=BYTES, scope=Scope.READ
    ),
    ("POST", "/v1/keyed_batches"): EndpointDescription(
        "The batches with these idempotency keys.",
        list[KeyedBatch],
        body=BatchKeys,
        scope=Scope.READ,
    ),
    ("POST", "/v1/instances"): EndpointDescription(
        "The submitted instances of these groups, for submitting them again.",
        list[Instance],
        body=GroupIds,
        scope=Scope.SUBMIT,
    ),
    ("GET", "/v1/steps"): EndpointDescription(
        "The record of a training run's newest step: a list of at most one.",
        list[RecordedStep],
        StepQuery,
        scope=Scope.READ,
    ),
    ("POST", "/v1/steps"): EndpointDescription(
        "Record a step, unless it is recorded.", RecordedStep, body=StepRecord, scope=Scope.SUBMIT
    ),
    ("POST", "/v1/solve_rates"): EndpointDescription(
        "The solve rates of instances in a training run.", list[SolveRate], body=RatesQuery, scope=Scope.READ
    ),
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

_ALIVE_S = 10.0
"""Seconds until a comment is sent as a keepalive, if nothing ends."""
_POLL_S = 2.0
_AGAIN_S = 1.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_MOST = 512
"""The maximum number of streams of one process: each reads the store now and then."""


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of batches, rollouts, annotations, training runs and archives, and of verbs for any id."""
    return [
        *_batch_routes(endpoints),
        *_rollout_routes(endpoints),
        *_run_routes(endpoints),
        *_archive_routes(endpoints),
    ]


def _batch_routes(endpoints: Endpoints) -> list[Route]:
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


def _rollout_routes(endpoints: Endpoints) -> list[Route]:
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


def _run_routes(endpoints: Endpoints) -> list[Route]:
    runs = endpoints.farm.runs

    def recorded(request: ApiRequest) -> list[RecordedStep]:
        wanted = request.parse_query(StepQuery)
        step = runs.recorded_step(wanted.run, wanted.up_to)
        return [] if step is None else [step]

    def record(request: ApiRequest) -> RecordedStep:
        body = request.parse_body(StepRecord)
        return runs.record_step(body.run, body.step, body.record)

    def rates(request: ApiRequest) -> list[SolveRate]:
        body = request.parse_body(RatesQuery)
        window = {"min_version": body.min_version, "solved_at": body.solved_at}
        return list(runs.solve_rates(body.run, body.data_source, body.instance_ids, **window))  # type: ignore[arg-type]

    return [
        endpoints.post("/v1/keyed_batches", lambda request: runs.keyed_batches(request.parse_body(BatchKeys).keys)),
        endpoints.post("/v1/instances", lambda request: runs.instances(request.parse_body(GroupIds).group_ids)),
        endpoints.get("/v1/steps", recorded),
        endpoints.post("/v1/steps", record),
        endpoints.post("/v1/solve_rates", rates),
    ]


def _archive_routes(endpoints: Endpoints) -> list[Route]:
    farm = endpoints.farm

    def put_part(request: ApiRequest) -> ArchiveState:
        body = request.parse_body(ArchivePart)
        try:
            data = b64decode(body.data, validate=True)
        except (NoBase64, ValueError):
            raise InvalidRequest("is not base64", field="data") from None
        farm.put_archive_part(_digest(request), body.number, data)
        return ArchiveState(False, (body.number,))

    def complete(request: ApiRequest) -> ArchiveState:
        farm.complete_archive(_digest(request), request.parse_body(ArchiveEnd).n_parts)
        return ArchiveState(True)

    return [
        endpoints.get("/v1/archives/{digest}", lambda request: farm.archive_state(_digest(request))),
        endpoints.post("/v1/archives/{digest}/parts", put_part),
        endpoints.post("/v1/archives/{digest}", complete),
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


def _digest(request: ApiRequest) -> str:
    return request.path["digest"]


_ROLLOUTS, _GROUPS = 64, 8
"""The maximum number of rollouts, and of groups, that are read at a time."""


class EventStreams:
    """The streams of one process."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._n_open = 0

    async def open(self, request: ApiRequest) -> StreamingResponse:
        """Return the stream of a batch. Raises as a page of it does."""
        batch_id, query = request.path["id"], request.parse_query(EventQuery)
        cursor = await self._endpoints.run(self._start, batch_id, query, request.headers.get("last-event-id", ""))
        # errors in the request are answered by a status, before anything is sent
        await self._endpoints.run(self._endpoints.farm.page, batch_id, cursor, query.groups, 1)
        if self._n_open >= _MOST:
            raise ServiceError(f"{_MOST} streams are open here: retry later, or at another API process")
        events = self._events(batch_id, cursor, query.groups)
        return StreamingResponse(events, headers=_HEADERS, media_type="text/event-stream")

    def _start(self, batch_id: str, query: EventQuery, last_event_id: str) -> int:
        if last_event_id:
            if not last_event_id.isdecimal() or int(last_event_id) >= 2**31:
                raise InvalidRequest("is not a position of this stream", field="Last-Event-ID")
            return int(last_event_id)
        return self._endpoints.farm.acknowledged(batch_id, query.consumer) if query.cursor is None else query.cursor

    async def _events(self, batch_id: str, cursor: int, groups: bool) -> AsyncIterator[bytes]:
        self._n_open += 1
        try:
            yield b"retry: 1000\n\n"
            sent_at = time.monotonic()
            while not self._endpoints.is_closed:
                ask = partial(self._endpoints.farm.page, batch_id, cursor, groups, _GROUPS if groups else _ROLLOUTS)
                poll = LongPoll(batch_id, ask, lambda page: page.settled, _ALIVE_S, _POLL_S)
                try:
                    page: Page = await self._endpoints.wait_until(poll)
                except ServiceError:
                    # wait for an unavailable database, as other clients do
                    await asyncio.sleep(_AGAIN_S)
                    page = Page((), False)
                if page.rollouts:
                    for event in _written(page, groups):
                        yield event
                    cursor, sent_at = max(rollout.cursor for rollout in page.rollouts), time.monotonic()
                elif page.is_last:
                    yield _event("done", b"{}", cursor)
                    return
                elif time.monotonic() - sent_at >= _ALIVE_S:
                    yield b": nothing ended yet\n\n"
                    sent_at = time.monotonic()
        except (FarmError, NotAllowed) as error:
            yield _event("error", problem_of(error).body(), cursor)
        finally:
            self._n_open -= 1


def _written(page: Page, groups: bool) -> Iterator[bytes]:
    if not groups:
        for rollout in page.rollouts:
            yield _event("rollout", serialization.written(rollout), rollout.cursor)
        return
    for index in dict.fromkeys(rollout.group_index for rollout in page.rollouts):
        members = [rollout for rollout in page.rollouts if rollout.group_index == index]
        yield _event("group", serialization.written(members), max(rollout.cursor for rollout in members))


def _event(kind: str, data: bytes, cursor: int) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (cursor, kind.encode(), data)

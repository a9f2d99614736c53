"""Batches over HTTP, their rollouts, training runs, and task archives, which are uploaded in parts, by digest.

The id of a server-sent event is the consumer's cursor. So a client whose connection broke resumes at its own position,
at any API process, by Last-Event-ID, as EventSource in browsers and other clients of such streams do by themselves.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from binascii import Error as NoBase64
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response, StreamingResponse

from farm.api.endpoints import BYTES, EVENTS, Endpoints, EndpointTable, ListPage, LongPoll, list_page
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
from farm.client.local import LocalFarm
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
_ALIVE_S = 10.0
"""Seconds until a comment is sent as a keepalive, if nothing ends."""
_POLL_S = 2.0
_AGAIN_S = 1.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_MOST = 512
"""The maximum number of streams of one process: each reads the store now and then."""
_ROLLOUTS, _GROUPS = 64, 8
"""The maximum number of rollouts, and of groups, that are read at a time."""
ENDPOINTS = EndpointTable()


@ENDPOINTS.add("POST", "/v1/batches", "Submit a batch.", Scope.SUBMIT, body=BatchRequest)
def submit(farm: LocalFarm, request: ApiRequest) -> Submitted:
    return Submitted(farm.submit(_own_key(request.body)))


@ENDPOINTS.add("GET", "/v1/batches", "The newest batches.", Scope.READ)
def newest(farm: LocalFarm, query: RecentQuery) -> ListPage[BatchSummary]:
    return list_page(farm.batches(query.limit, query.before), query.limit, "before", lambda each: each.batch_id)


@ENDPOINTS.add("GET", "/v1/batches/{id}", "The progress of a batch.", Scope.READ)
def status(farm: LocalFarm, id: str) -> BatchStatus:
    return farm.status(id)


@ENDPOINTS.add("GET", "/v1/batches/{id}/rollouts", "Its rollouts, without training rows, page by page.", Scope.READ)
def rollouts(farm: LocalFarm, id: str, query: AfterQuery) -> ListPage[Rollout]:
    page = farm.rollouts_after(id, query.after, query.limit)
    return list_page(page, query.limit, "after", lambda each: each.rollout_id)


@ENDPOINTS.add(
    "GET",
    "/v1/batches/{id}/events",
    "Its rollouts, or complete groups, as they end, as server-sent events; Last-Event-ID resumes after an event.",
    Scope.READ,
    returns=str,
    media_type=EVENTS,
)
async def events(endpoints: Endpoints, id: str, request: ApiRequest, query: EventQuery) -> StreamingResponse:
    cursor = await endpoints.run(_start, endpoints.farm, id, query, request.headers.get("last-event-id", ""))
    # errors in the request are answered by a status, before anything is sent
    await endpoints.run(endpoints.farm.page, id, cursor, query.groups, 1)
    if endpoints.n_streams >= _MOST:
        raise ServiceError(f"{_MOST} streams are open here: retry later, or at another API process")
    return StreamingResponse(_events(endpoints, id, cursor, query.groups), headers=_HEADERS, media_type=EVENTS)


@ENDPOINTS.add(
    "GET",
    "/v1/batches/{id}/ended",
    "A page of rollouts, or of complete groups, that ended after a cursor, with training rows.",
    Scope.READ,
)
async def ended(endpoints: Endpoints, id: str, query: EndedQuery) -> Page:
    ask = partial(endpoints.farm.page, id, query.cursor, query.groups, query.limit)
    return await endpoints.wait_until(LongPoll(id, ask, lambda page: page.settled, query.wait_s))


@ENDPOINTS.add("GET", "/v1/batches/{id}/open", "Tells if a batch has open rollouts.", Scope.READ)
async def has_open(endpoints: Endpoints, id: str, query: OpenQuery) -> bool:
    ask = partial(endpoints.farm.has_open, id)
    return await endpoints.wait_until(LongPoll(id, ask, lambda is_open: not is_open, query.wait_s))


@ENDPOINTS.add("GET", "/v1/batches/{id}/acknowledged", "A consumer's cursor.", Scope.READ)
def acknowledged(farm: LocalFarm, id: str, query: ConsumerQuery) -> int:
    return farm.acknowledged(id, query.consumer)


@ENDPOINTS.add("POST", "/v1/batches/{id}/acknowledged", "Move a consumer's cursor on.", Scope.SUBMIT)
def acknowledge(farm: LocalFarm, id: str, body: Acknowledgement) -> int:
    return farm.acknowledge_up_to(id, body.cursor, body.consumer)


@ENDPOINTS.add("GET", "/v1/batches/{id}/conservation", "Counts of submitted, ended and in-flight rollouts.", Scope.READ)
def conservation(farm: LocalFarm, id: str) -> Conservation:
    return farm.conservation(id)


@ENDPOINTS.add("GET", "/v1/batches/{id}/violations", "The violated invariants of a batch.", Scope.READ)
def violations(farm: LocalFarm, id: str) -> Sequence[Violation]:
    return farm.violations(id)


@ENDPOINTS.add("GET", "/v1/batches/{id}/stage_times", "Queueing and working times by stage.", Scope.READ)
def stage_times(farm: LocalFarm, id: str) -> Sequence[StageTimes]:
    return farm.stage_times(id)


@ENDPOINTS.add("POST", "/v1/cancel", "Cancel a batch, a group or a rollout.", (Scope.SUBMIT, Scope.OPERATE))
def cancel(farm: LocalFarm, body: RolloutSelection) -> list[str]:
    return farm.cancel(body.id, body.rollout_ids)


@ENDPOINTS.add("POST", "/v1/rescore", "Score rollouts again.", (Scope.SUBMIT, Scope.OPERATE))
def rescore(farm: LocalFarm, body: RolloutSelection) -> list[str]:
    return farm.rescore(body.id, body.rollout_ids)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}", "A rollout, without training rows.", Scope.READ)
def rollout(farm: LocalFarm, id: str) -> Rollout:
    return farm.rollout(id)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}/calls", "Its model calls.", Scope.READ)
def calls(farm: LocalFarm, id: str, query: CallsQuery) -> ListPage[ModelCall]:
    later = [call for call in farm.calls(id) if query.after is None or call.index > query.after]
    return list_page(later[: query.limit], query.limit, "after", lambda call: call.index)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}/timings", "Every stage of every attempt.", Scope.READ)
def timings(farm: LocalFarm, id: str) -> Sequence[Timing]:
    return farm.timings(id)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}/rewards", "Its scores, newest last.", Scope.READ)
def rewards(farm: LocalFarm, id: str) -> Sequence[Reward]:
    return farm.rewards(id)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}/annotations", "The annotations that trainers wrote about it.", Scope.READ)
def annotations_of(farm: LocalFarm, id: str) -> Sequence[Annotation]:
    return farm.annotations.of(id)


@ENDPOINTS.add("POST", "/v1/annotations", "Write a trainer's annotations of rollouts.", (Scope.SUBMIT, Scope.OPERATE))
def annotate(farm: LocalFarm, body: NewAnnotations) -> int:
    return farm.annotations.write(body.producer, body.step, body.annotations)


@ENDPOINTS.add("GET", "/v1/rollouts/{id}/artefacts", "Its stored artefacts.", Scope.READ)
def artefacts(farm: LocalFarm, id: str) -> Sequence[KeptArtefact]:
    return farm.artefacts(id)


@ENDPOINTS.add(
    "GET", "/v1/rollouts/{id}/artefact", "The bytes of an artefact.", Scope.READ, returns=bytes, media_type=BYTES
)
def artefact(farm: LocalFarm, id: str, query: ArtefactQuery) -> Response:
    return Response(farm.artefact(id, query.name), headers=_UNTRUSTED, media_type=BYTES)


@ENDPOINTS.add("POST", "/v1/keyed_batches", "The batches with these idempotency keys.", Scope.READ)
def keyed_batches(farm: LocalFarm, body: BatchKeys) -> Sequence[KeyedBatch]:
    return farm.runs.keyed_batches(body.keys)


@ENDPOINTS.add(
    "POST", "/v1/instances", "The submitted instances of these groups, for submitting them again.", Scope.SUBMIT
)
def instances(farm: LocalFarm, body: GroupIds) -> Sequence[Instance]:
    return farm.runs.instances(body.group_ids)


@ENDPOINTS.add("GET", "/v1/steps", "The record of a training run's newest step: a list of at most one.", Scope.READ)
def newest_step(farm: LocalFarm, query: StepQuery) -> list[RecordedStep]:
    step = farm.runs.recorded_step(query.run, query.up_to)
    return [] if step is None else [step]


@ENDPOINTS.add("POST", "/v1/steps", "Record a step, unless it is recorded.", Scope.SUBMIT)
def record_step(farm: LocalFarm, body: StepRecord) -> RecordedStep:
    return farm.runs.record_step(body.run, body.step, body.record)


@ENDPOINTS.add("POST", "/v1/solve_rates", "The solve rates of instances in a training run.", Scope.READ)
def solve_rates(farm: LocalFarm, body: RatesQuery) -> Sequence[SolveRate]:
    window = {"min_version": body.min_version, "solved_at": body.solved_at}
    return farm.runs.solve_rates(body.run, body.data_source, body.instance_ids, **window)  # type: ignore[arg-type]


@ENDPOINTS.add("GET", "/v1/archives/{digest}", "How much of a task archive is there.", Scope.READ)
def archive_state(farm: LocalFarm, digest: str) -> ArchiveState:
    return farm.archive_state(digest)


@ENDPOINTS.add("POST", "/v1/archives/{digest}/parts", "Store a part of a task archive, in base64.", Scope.SUBMIT)
def put_part(farm: LocalFarm, digest: str, body: ArchivePart) -> ArchiveState:
    try:
        data = b64decode(body.data, validate=True)
    except (NoBase64, ValueError):
        raise InvalidRequest("is not base64", field="data") from None
    farm.put_archive_part(digest, body.number, data)
    return ArchiveState(False, (body.number,))


@ENDPOINTS.add(
    "POST",
    "/v1/archives/{digest}",
    "Check that a task archive is whole and sound; then instances may name it.",
    Scope.SUBMIT,
)
def complete_archive(farm: LocalFarm, digest: str, body: ArchiveEnd) -> ArchiveState:
    farm.complete_archive(digest, body.n_parts)
    return ArchiveState(True)


def _own_key(body: Any) -> Any:
    """Return a submit request. Its key may not have a protocol's prefix, as a protocol's clients see all such batches.

    Raises InvalidRequest.
    """
    key = body.get("idempotency_key") if isinstance(body, dict) else None
    protocol, colon, _ = key.partition(":") if isinstance(key, str) else ("", "", "")
    if colon and protocol in installed(PROTOCOLS):
        raise InvalidRequest(f"must not begin with {protocol}:, the prefix of that protocol", field="idempotency_key")
    return body


def _start(farm: LocalFarm, batch_id: str, query: EventQuery, last_event_id: str) -> int:
    if last_event_id:
        if not last_event_id.isdecimal() or int(last_event_id) >= 2**31:
            raise InvalidRequest("is not a position of this stream", field="Last-Event-ID")
        return int(last_event_id)
    return farm.acknowledged(batch_id, query.consumer) if query.cursor is None else query.cursor


async def _events(endpoints: Endpoints, batch_id: str, cursor: int, groups: bool) -> AsyncIterator[bytes]:
    endpoints.n_streams += 1
    try:
        yield b"retry: 1000\n\n"
        sent_at = time.monotonic()
        while not endpoints.is_closed:
            ask = partial(endpoints.farm.page, batch_id, cursor, groups, _GROUPS if groups else _ROLLOUTS)
            poll = LongPoll(batch_id, ask, lambda page: page.settled, _ALIVE_S, _POLL_S)
            try:
                page = await endpoints.wait_until(poll)
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
        endpoints.n_streams -= 1


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

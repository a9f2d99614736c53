"""A batch as server-sent events: its rollouts, or complete groups, as they end, resumed by Last-Event-ID.

The id of an event is the consumer's cursor. So a client whose connection broke resumes at its own position, at any API
process, as EventSource in browsers and other clients of such streams do by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

from starlette.responses import StreamingResponse

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.schemas import ApiRequest, EventQuery
from farm.client import serialization
from farm.client.consumer_stream import Page
from farm.client.http_errors import problem_of
from farm.errors import FarmError, InvalidRequest, NotAllowed, ServiceError

_ROLLOUTS, _GROUPS = 64, 8
"""The maximum number of rollouts, and of groups, that are read at a time."""
_ALIVE_S = 10.0
"""Seconds until a comment is sent as a keepalive, if nothing ends."""
_POLL_S = 2.0
_AGAIN_S = 1.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_MOST = 512
"""The maximum number of streams of one process: each reads the store now and then."""


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

"""E2B's REST API for sandboxes: create, list, extend and kill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from starlette.responses import Response

from farm.api.e2b.e2b_requests import (
    DEFAULT_TEMPLATE,
    ConnectOrder,
    ListingQuery,
    NewSandbox,
    RefreshOrder,
    TimeoutOrder,
    lease_of,
)
from farm.api.endpoints import Endpoints, LongPoll
from farm.api.schemas import ApiRequest
from farm.callers import current_caller
from farm.client import serialization
from farm.errors import FarmUnreachable, Forbidden, NotFound, SandboxEnded
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, SandboxState, check_borrower
from farm.records.sandbox_spec import SandboxSpec

ENVD_VERSION = "0.6.1"
"""The supported version of E2B's agent, except for the features that the docs name."""
_WAIT_S = 5.0
"""Seconds between checks whether a client still waits for its sandbox."""
_PAGE = 1000


class RestSandboxes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._borrower = endpoints.farm.sandboxes

    async def create(self, request: ApiRequest) -> Response:
        """Borrow a sandbox, and answer once it runs.

        If the client leaves, it is ended, unless it has an idempotency key.
        """
        wanted = request.parse_body(NewSandbox)
        key = request.headers.get("idempotency-key", "")
        borrow = wanted.borrow_request(key)
        state: BorrowedSandbox = await self._endpoints.run(self._borrower.begin, borrow)
        try:
            state = await self._running(state, request)
        except BaseException:
            if not key:
                await self._endpoints.run(self._borrower.stop, state.sandbox_id)
            raise
        return _json(_created(state, request), 201)

    async def _running(self, state: BorrowedSandbox, request: ApiRequest) -> BorrowedSandbox:
        """Return a sandbox once it runs, with a lease that begins then. Raises SandboxEnded if it does not start."""
        while _is_pending(state):
            ask = partial(self._borrower.get, state.sandbox_id)
            wanted = LongPoll(state.sandbox_id, ask, lambda now: not _is_pending(now), _WAIT_S)
            state = await self._endpoints.wait_until(wanted)
            if self._endpoints.is_closed or await request.is_disconnected():
                raise FarmUnreachable("this API process ends, or its client has left: send the request again")
            if not state.ended:
                state = await self._endpoints.run(self._borrower.renew, state.sandbox_id)
        if state.ended:
            raise state.ended_error()
        return state

    def one(self, request: ApiRequest) -> Any:
        """Return the state of a sandbox."""
        return _detail(self._open(request))

    def _open(self, request: ApiRequest) -> BorrowedSandbox:
        """Return the sandbox of a path. Raises NotFound for an ended one, and Forbidden for another caller's."""
        state = self._borrower.get(request.path["reference"])
        if state.ended:
            raise NotFound(str(state.ended_error()))
        check_borrower(current_caller(), state.sandbox_id, state.borrower)
        return state

    def listing(self, request: ApiRequest) -> Response:
        """Return the caller's sandboxes, a page at a time."""
        query = request.parse_query(ListingQuery)
        labels = query.labels()
        result: list[BorrowedSandbox] = []
        before = query.next_token or None
        more = query.running
        while more and len(result) <= query.limit:
            page = self._borrower.list(_PAGE, before=before)
            result += [state for state in page if _is_own(state) and labels.items() <= state.labels.items()]
            more = len(page) == _PAGE
            before = page[-1].sandbox_id if page else None
        shown = result[: query.limit]
        headers = {"x-next-token": shown[-1].sandbox_id} if len(result) > query.limit else {}
        return Response(serialization.written(list(map(_detail, shown))), 200, headers, "application/json")

    def set_timeout(self, request: ApiRequest) -> Response:
        """Let it end so many seconds from now, unless it is used."""
        return self._renewed(request, request.parse_body(TimeoutOrder).timeout)

    def refresh(self, request: ApiRequest) -> Response:
        return self._renewed(request, request.parse_body(RefreshOrder).duration)

    def _renewed(self, request: ApiRequest, timeout: int) -> Response:
        state = self._open(request)
        try:
            self._borrower.renew(state.sandbox_id, lease_of(timeout))
        except SandboxEnded as ended:
            raise NotFound(str(ended)) from None
        return Response(status_code=204)

    def connect(self, request: ApiRequest) -> Response:
        """Return a sandbox in the form of `create`; its time to live is extended, never shortened."""
        wanted = request.parse_body(ConnectOrder)
        state = self._open(request)
        lease_s = lease_of(wanted.timeout)
        if lease_s > state.lease_left_s:
            state = self._borrower.renew(state.sandbox_id, lease_s)
        return _json(_created(state, request), 200)

    def kill(self, request: ApiRequest) -> Response:
        """End a sandbox."""
        self._borrower.stop(self._open(request).sandbox_id)
        return Response(status_code=204)


def _is_pending(state: BorrowedSandbox) -> bool:
    return state.state in (SandboxState.WAITING, SandboxState.STARTING)


def _is_own(state: BorrowedSandbox) -> bool:
    try:
        check_borrower(current_caller(), state.sandbox_id, state.borrower)
    except Forbidden:
        return False
    return True


def _json(value: Mapping[str, Any], status: int) -> Response:
    return Response(serialization.written(value), status, media_type="application/json")


def _named(state: BorrowedSandbox) -> dict[str, Any]:
    template = DEFAULT_TEMPLATE if state.image == SandboxSpec().image else state.image
    return {
        "sandboxID": state.sandbox_id,
        "templateID": template,
        "alias": template,
        "clientID": state.node or "farm",
        "envdVersion": ENVD_VERSION,
    }


def _created(state: BorrowedSandbox, request: ApiRequest) -> dict[str, Any]:
    """Return the data for calling a new sandbox: the agent's token is the key of the request."""
    return {**_named(state), "envdAccessToken": request.key}


def _detail(state: BorrowedSandbox) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        **_named(state),
        "startedAt": (now - timedelta(seconds=state.age_s)).isoformat(),
        "endAt": (now + timedelta(seconds=state.lease_left_s)).isoformat(),
        "state": "running",
        "cpuCount": math.ceil(state.cpus or 0),
        "memoryMB": state.memory_mb,
        "diskSizeMB": state.disk_mb,
        "metadata": dict(state.labels),
    }

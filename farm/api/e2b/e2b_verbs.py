"""The routes of E2B's protocol: its REST API, and the agent's service of the sandbox that a header names.

Its client takes the same address for both, as `E2B_API_URL` and `E2B_SANDBOX_URL`.

Fields for features that a rootless sandbox lacks are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import AfterValidator, Field
from starlette.responses import Response
from starlette.routing import BaseRoute

from farm.api.auth import RouteScopes
from farm.api.e2b.agent_files import AgentFiles, AgentSandbox
from farm.api.e2b.agent_processes import AgentProcesses
from farm.api.e2b.connect_rpc import STREAM, ConnectError, SandboxMissing, connect_error, refuse_with_code, stream_end
from farm.api.endpoints import Endpoints
from farm.api.protocols import WireProtocol
from farm.api.schemas import ApiRequest, RequestRejected
from farm.callers import Scope, current_caller
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.errors import FarmError, FarmUnreachable, Forbidden, InvalidRequest, NotFound, SandboxEnded
from farm.records.lending.borrowed_sandbox import (
    LEAST_LEASE_S,
    MAX_LEASE_S,
    BorrowedSandbox,
    BorrowRequest,
    Labels,
    check_borrower,
)
from farm.records.request_values import Name, Request
from farm.records.sandbox_spec import SandboxSpec

DEFAULT_TEMPLATE = "base"
"""The template of requests that name none: the farm's default image."""
_TIMEOUT_S = 300

_Timeout = Annotated[int, Field(ge=0, le=int(MAX_LEASE_S))]

ENVD_VERSION = "0.6.1"
"""The supported version of E2B's agent, except for the features that the docs name."""
_WAIT_S = 5.0
"""Seconds between checks whether a client still waits for its sandbox."""
_PAGE = 1000

Verb = Callable[[ApiRequest], Awaitable[Response]]
_ALL = "/sandboxes"
_ONE = "/sandboxes/{reference}"
_VERSIONS = ("", "/v2")
_USES = (Scope.SUBMIT, Scope.OPERATE)
_UNSUPPORTED = (
    ("POST", f"{_ONE}/pause"),
    ("POST", f"{_ONE}/fork"),
    ("POST", f"{_ONE}/snapshots"),
    ("PUT", f"{_ONE}/network"),
    ("GET", f"{_ONE}/metrics"),
    ("GET", f"{_ONE}/logs"),
    ("GET", f"/v2{_ONE}/logs"),
    ("GET", "/snapshots"),
    ("GET", "/templates"),
    ("GET", "/v2/templates"),
    ("POST", "/v3/templates"),
    ("GET", "/volumes"),
    ("POST", "/volumes"),
    ("GET", "/secrets"),
    ("POST", "/secrets"),
)
"""Routes of E2B's API without a counterpart in the farm."""
_PROCESS_VERBS: Sequence[tuple[str, Callable[[AgentProcesses, ApiRequest], Awaitable[Response]], bool]] = (
    ("Start", AgentProcesses.start, True),
    ("Connect", AgentProcesses.connect, True),
    ("StreamInput", AgentProcesses.stream_input, True),
    ("List", AgentProcesses.list, False),
    ("Update", AgentProcesses.update, False),
    ("SendInput", AgentProcesses.send_input, False),
    ("CloseStdin", AgentProcesses.close_stdin, False),
    ("SendSignal", AgentProcesses.send_signal, False),
)
"""Methods of the process service, and whether each is answered by a stream."""
_FILE_VERBS: Sequence[tuple[str, Callable[[AgentFiles, ApiRequest], Awaitable[Response]], bool]] = (
    ("Stat", AgentFiles.stat, False),
    ("ListDir", AgentFiles.list_dir, False),
    ("MakeDir", AgentFiles.make_dir, False),
    ("Move", AgentFiles.move, False),
    ("Remove", AgentFiles.remove, False),
    ("WatchDir", AgentFiles.unsupported, True),
    ("CreateWatcher", AgentFiles.unsupported, False),
    ("GetWatcherEvents", AgentFiles.unsupported, False),
    ("RemoveWatcher", AgentFiles.unsupported, False),
)


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("is not supported by the farm's sandboxes: leave it out")
    return value


Unsupported = Annotated[Any, AfterValidator(_nothing)]
"""A field that must be empty or absent; some clients send it empty."""


class _AutoResume(Request):
    enabled: Literal[False] = False
    timeout: Any = None


class NewSandbox(Request):
    """A sandbox of a template, which is an image as `SandboxSpec.image` names it."""

    template: Annotated[Name, Field(alias="templateID", min_length=1, max_length=1000)] = DEFAULT_TEMPLATE
    timeout: _Timeout = _TIMEOUT_S
    auto_pause: Annotated[Unsupported, Field(alias="autoPause")] = False
    auto_pause_memory: Annotated[bool, Field(alias="autoPauseMemory")] = True
    auto_resume: Annotated[_AutoResume | None, Field(alias="autoResume")] = None
    secure: bool = True
    allow_internet_access: bool | None = None
    network: Unsupported = None
    metadata: Labels = Field(default_factory=dict)
    env: Annotated[dict[Name, Name], Field(alias="envVars")] = Field(default_factory=dict)
    mcp: Unsupported = None
    iam: Unsupported = None
    volume_mounts: Annotated[Unsupported, Field(alias="volumeMounts")] = None

    def borrow_request(self, idempotency_key: str) -> BorrowRequest:
        """Return its request to borrow. The network is the node's, and only given on request."""
        image = SandboxSpec().image if self.template == DEFAULT_TEMPLATE else self.template
        online = bool(self.allow_internet_access)
        return BorrowRequest(
            spec=SandboxSpec(image=image, env=self.env, network=online),
            network="allow" if online else "refuse",
            lease_s=lease_of(self.timeout),
            name=f"e2b:{idempotency_key}" if idempotency_key else "",
            labels=self.metadata,
        )


def lease_of(timeout: int) -> float:
    """Return a time to live as a lease, which has a minimum length."""
    return max(LEAST_LEASE_S, float(timeout))


class TimeoutOrder(Request):
    """`timeout` seconds from now on."""

    timeout: _Timeout = _TIMEOUT_S


class ConnectOrder(Request):
    """As `TimeoutOrder`, but only extends the time to live. The other fields are for paused sandboxes."""

    timeout: _Timeout = _TIMEOUT_S
    memory: bool | None = None
    auto_pause: Annotated[bool | None, Field(alias="autoPause")] = None


class RefreshOrder(Request):
    """As `TimeoutOrder`, in the form of earlier clients."""

    duration: _Timeout = _TIMEOUT_S


class ListingQuery(Request):
    """The sandboxes that have all of these labels, newest first, from a token on."""

    metadata: Name = ""
    state: Name = ""
    limit: Annotated[int, Field(ge=1, le=100)] = 100
    next_token: Annotated[Name, Field(alias="nextToken")] = ""
    order: Literal["", "desc"] = ""

    def labels(self) -> dict[str, str]:
        """Return the labels of the query. Raises InvalidRequest."""
        try:
            return dict(parse_qsl(self.metadata, keep_blank_values=True, strict_parsing=bool(self.metadata)))
        except ValueError:
            raise InvalidRequest("must be of the form name=value&name=value", field="metadata") from None

    @property
    def running(self) -> bool:
        """False for a query of paused sandboxes only: none is ever paused."""
        return not self.state or "running" in self.state.split(",")


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
        while state.pending:
            state = await self._endpoints.await_sandbox(state, _WAIT_S)
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
        sandboxes: list[BorrowedSandbox] = []
        before = query.next_token or None
        more = query.running
        while more and len(sandboxes) <= query.limit:
            page = self._borrower.list(_PAGE, before=before)
            sandboxes += [state for state in page if _is_own(state) and labels.items() <= state.labels.items()]
            more = len(page) == _PAGE
            before = page[-1].sandbox_id if page else None
        shown = sandboxes[: query.limit]
        headers = {"x-next-token": shown[-1].sandbox_id} if len(sandboxes) > query.limit else {}
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


_VERBS: Sequence[tuple[str, str, Callable[[RestSandboxes, ApiRequest], Any], Scope | tuple[Scope, ...]]] = (
    *(("GET", f"{version}{_ALL}", RestSandboxes.listing, Scope.READ) for version in _VERSIONS),
    *(("POST", f"{version}{_ONE}/connect", RestSandboxes.connect, _USES) for version in _VERSIONS),
    ("GET", _ONE, RestSandboxes.one, Scope.READ),
    ("DELETE", _ONE, RestSandboxes.kill, _USES),
    ("POST", f"{_ONE}/resume", RestSandboxes.connect, _USES),
    ("POST", f"{_ONE}/timeout", RestSandboxes.set_timeout, _USES),
    ("POST", f"{_ONE}/refreshes", RestSandboxes.refresh, _USES),
)
"""Routes of the REST API with their scopes."""


def _process_path(verb: str) -> str:
    return f"/process.Process/{verb}"


def _file_path(verb: str) -> str:
    return f"/filesystem.Filesystem/{verb}"


def _routes(endpoints: Endpoints) -> Sequence[BaseRoute]:
    rest, processes, files = RestSandboxes(endpoints), AgentProcesses(endpoints), AgentFiles(endpoints)

    def agent(method: str, path: str, verb: Verb, streams: bool = False) -> BaseRoute:
        return endpoints.route(method, path, lambda request: _response_of(verb, request, streams), takes_body=False)

    async def health(request: ApiRequest) -> Response:
        await AgentSandbox(endpoints, request).check()
        return Response(status_code=204)

    return [
        *(endpoints.route("POST", f"{version}{_ALL}", rest.create) for version in _VERSIONS),
        *(endpoints.route(method, path, partial(endpoints.run, verb, rest)) for method, path, verb, _ in _VERBS),
        *(endpoints.route(method, path, _unsupported, takes_body=False) for method, path in _UNSUPPORTED),
        agent("GET", "/health", health),
        agent("GET", "/files", files.read),
        agent("POST", "/files", files.write),
        *(agent("POST", _process_path(name), partial(verb, processes), ends) for name, verb, ends in _PROCESS_VERBS),
        *(agent("POST", _file_path(name), partial(verb, files), ends) for name, verb, ends in _FILE_VERBS),
    ]


async def _response_of(verb: Verb, request: ApiRequest, streams: bool) -> Response:
    """Return the response of a method of the agent, or its error in the form of that kind of response."""
    try:
        return await verb(request)
    except SandboxMissing as error:
        return error.response()
    except Forbidden:
        raise
    except ConnectError as error:
        wrong = error
    except FarmError as error:
        wrong = connect_error(error)
    return Response(stream_end(wrong), media_type=STREAM) if streams else wrong.response()


async def _unsupported(request: ApiRequest) -> Response:
    words = "the farm has no templates, volumes, snapshots, pauses or secrets of E2B: a template is an image"
    raise RequestRejected(ProblemDetails(501, "InvalidRequest", words))


_SCOPES: RouteScopes = {
    **{("POST", f"{version}{_ALL}"): Scope.SUBMIT for version in _VERSIONS},
    **{(method, path): scope for method, path, _, scope in _VERBS},
    **dict.fromkeys(_UNSUPPORTED, Scope.READ),
    ("GET", "/health"): _USES,
    ("GET", "/files"): _USES,
    ("POST", "/files"): _USES,
    **{("POST", _process_path(name)): _USES for name, _, _ in _PROCESS_VERBS},
    **{("POST", _file_path(name)): _USES for name, _, _ in _FILE_VERBS},
}

PROTOCOL = WireProtocol(_routes, refuse_with_code, _SCOPES)

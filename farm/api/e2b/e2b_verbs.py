"""The routes of E2B's protocol: its REST API, and the agent's service of the sandbox that a header names.

Its client takes the same address for both, as `E2B_API_URL` and `E2B_SANDBOX_URL`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from farm.api.e2b.agent_files import AgentFiles
from farm.api.e2b.agent_processes import AgentProcesses
from farm.api.e2b.agent_sandbox import AgentSandbox
from farm.api.e2b.connect_rpc import STREAM, ConnectError, SandboxMissing, connect_error, refuse_with_code, stream_end
from farm.api.e2b.e2b_sandboxes import RestSandboxes
from farm.api.endpoints import Endpoints
from farm.api.protocols import WireProtocol
from farm.api.schemas import ApiRequest, RequestRejected
from farm.api.scopes import RouteScopes
from farm.callers import Scope
from farm.client.http_errors import ProblemDetails
from farm.errors import FarmError, Forbidden

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

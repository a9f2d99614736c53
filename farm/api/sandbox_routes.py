"""Borrowed sandboxes over HTTP: start, call, renew and stop, by id or name, from any process of the API.

A call goes directly to the worker of the sandbox's node, and no thread waits for it.
"""

from __future__ import annotations

from functools import partial

from starlette.responses import Response
from starlette.routing import Route

from farm.api.endpoints import Endpoints, ListPage, LongPoll, list_page
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import ApiRequest, CallQuery, NoOrder, OpenQuery, SandboxesQuery
from farm.callers import Scope
from farm.client.sandboxes.node_line import SentCall
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest, RenewOrder, SandboxState
from farm.records.lending.sandbox_calls import CALL_S, CALLS

_PATH = "/v1/sandboxes"
_USES = (Scope.SUBMIT, Scope.OPERATE)
"""With the first, a caller uses the sandboxes that it borrowed itself; with the second, those of anybody."""
_ONE = _PATH + "/{reference}"
_SUMMARIES = {
    "exec": "Run one command to its end.",
    "shell": "Run a command in a persistent shell, or type to its running program.",
    "open_shell": "Open a shell with an unused name.",
    "close_shell": "Close a shell.",
    "read": "Read a file; or, packed, a folder as a tar.",
    "write": "Write a file; or, packed, a folder from a tar.",
    "list_files": "List the files of a folder.",
    "move_file": "Move a file or a folder.",
    "remove_file": "Remove a file, or a folder with its contents.",
    "make_folder": "Make a folder.",
    "start_process": "Start a program in the background.",
    "watch_process": "Wait for output of a process, or its end.",
    "write_process": "Write to the input of a process.",
    "signal_process": "Send a signal to a process.",
    "resize_process": "Set the size of the terminal of a process.",
    "list_processes": "List the running processes.",
    "tool": "Call one of the farm's tools, such as python.",
    "forget": "Forget results of calls by their call_id, so that these ids mean new calls from now on.",
}

ENDPOINTS: Described = {
    ("POST", _PATH): EndpointDescription("Borrow a sandbox.", BorrowedSandbox, body=BorrowRequest, scope=Scope.SUBMIT),
    ("GET", _PATH): EndpointDescription(
        "The newest borrowed sandboxes.", list[BorrowedSandbox], query=SandboxesQuery, scope=Scope.READ
    ),
    ("GET", _ONE): EndpointDescription(
        "A borrowed sandbox, once it runs or has ended, or after wait_s.",
        BorrowedSandbox,
        query=OpenQuery,
        scope=Scope.READ,
    ),
    ("POST", f"{_ONE}/renew"): EndpointDescription("Renew its lease.", BorrowedSandbox, body=RenewOrder, scope=_USES),
    ("POST", f"{_ONE}/stop"): EndpointDescription("End it.", BorrowedSandbox, body=NoOrder, scope=_USES),
    **{
        ("POST", f"{_ONE}/{verb}"): EndpointDescription(
            _SUMMARIES[verb], result, query=CallQuery, body=body, scope=_USES
        )
        for verb, (body, result) in CALLS.items()
    },
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of borrowed sandboxes."""
    sandboxes = endpoints.farm.sandboxes

    def begin(request: ApiRequest) -> BorrowedSandbox:
        return sandboxes.begin(request.parse_body(BorrowRequest))

    def listing(request: ApiRequest) -> ListPage:
        query = request.parse_query(SandboxesQuery)
        states = sandboxes.list(query.limit, query.ended, query.before)
        return list_page(states, query.limit, "before", lambda each: each.sandbox_id)

    async def watched(request: ApiRequest) -> BorrowedSandbox:
        reference, query = request.path["reference"], request.parse_query(OpenQuery)
        state: BorrowedSandbox = await endpoints.run(sandboxes.get, reference)
        if query.wait_s and _is_pending(state):
            ask = partial(sandboxes.get, state.sandbox_id)
            wanted = LongPoll(state.sandbox_id, ask, lambda now: not _is_pending(now), query.wait_s)
            state = await endpoints.wait_until(wanted)
        return state

    def renew(request: ApiRequest) -> BorrowedSandbox:
        return sandboxes.renew(request.path["reference"], request.parse_body(RenewOrder).lease_s)

    def stop(request: ApiRequest) -> BorrowedSandbox:
        request.parse_body(NoOrder)
        return sandboxes.stop(request.path["reference"])

    async def call(verb: str, request: ApiRequest) -> Response:
        call_id = request.parse_query(CallQuery).call_id
        body = request.parse_body(CALLS[verb][0])
        sent = SentCall(verb, request.data, getattr(body, "timeout_s", CALL_S), call_id)
        return Response(await endpoints.nodes.call(request.path["reference"], sent), media_type="application/json")

    return [
        endpoints.post(_PATH, begin),
        endpoints.get(_PATH, listing),
        endpoints.route("GET", _ONE, watched),
        endpoints.post(f"{_ONE}/renew", renew),
        endpoints.post(f"{_ONE}/stop", stop),
        *(endpoints.route("POST", f"{_ONE}/{verb}", partial(call, verb)) for verb in CALLS),
    ]


def _is_pending(state: BorrowedSandbox) -> bool:
    return state.state in (SandboxState.WAITING, SandboxState.STARTING)

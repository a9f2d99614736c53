"""Borrowed sandboxes over HTTP: start, call, renew and stop, by id or name, from any process of the API.

A call goes directly to the worker of the sandbox's node, and no thread waits for it.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from farm.api.endpoints import JSON, Endpoints, EndpointTable, ListPage, list_page
from farm.api.schemas import ApiRequest, CallQuery, NoOrder, OpenQuery, SandboxesQuery
from farm.callers import Scope
from farm.client.local import LocalFarm
from farm.client.sandboxes.node_line import SentCall
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest, RenewOrder
from farm.records.lending.sandbox_calls import CALL_S, CALLS
from farm.records.request_values import Request

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

ENDPOINTS = EndpointTable()


@ENDPOINTS.add("POST", _PATH, "Borrow a sandbox.", Scope.SUBMIT)
def begin(farm: LocalFarm, body: BorrowRequest) -> BorrowedSandbox:
    return farm.sandboxes.begin(body)


@ENDPOINTS.add("GET", _PATH, "The newest borrowed sandboxes.", Scope.READ)
def newest(farm: LocalFarm, query: SandboxesQuery) -> ListPage[BorrowedSandbox]:
    states = farm.sandboxes.list(query.limit, query.ended, query.before)
    return list_page(states, query.limit, "before", lambda each: each.sandbox_id)


@ENDPOINTS.add("GET", _ONE, "A borrowed sandbox, once it runs or has ended, or after wait_s.", Scope.READ)
async def watched(endpoints: Endpoints, reference: str, query: OpenQuery) -> BorrowedSandbox:
    state = await endpoints.run(endpoints.farm.sandboxes.get, reference)
    return await endpoints.await_sandbox(state, query.wait_s) if query.wait_s and state.pending else state


@ENDPOINTS.add("POST", f"{_ONE}/renew", "Renew its lease.", _USES)
def renew(farm: LocalFarm, reference: str, body: RenewOrder) -> BorrowedSandbox:
    return farm.sandboxes.renew(reference, body.lease_s)


@ENDPOINTS.add("POST", f"{_ONE}/stop", "End it.", _USES)
def stop(farm: LocalFarm, reference: str, body: NoOrder) -> BorrowedSandbox:
    return farm.sandboxes.stop(reference)


def _add_call(verb: str, body_model: type[Request], result: type[Any]) -> None:
    @ENDPOINTS.add("POST", f"{_ONE}/{verb}", _SUMMARIES[verb], _USES, body=body_model, returns=result)
    async def call(
        endpoints: Endpoints, reference: str, request: ApiRequest, query: CallQuery, body: Request
    ) -> Response:
        sent = SentCall(verb, request.data, getattr(body, "timeout_s", CALL_S), query.call_id)
        return Response(await endpoints.nodes.call(reference, sent), media_type=JSON)


for _verb, (_body, _result) in CALLS.items():
    _add_call(_verb, _body, _result)

"""The routes of SWE-ReX's server, each below a borrowed sandbox.

Errors are `{"swerexception": …}`, which the client raises as the class that it names. Invalid requests, for example
without a key, of another form or for an unknown path, are refused with `{"detail": …}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.routing import BaseRoute

from farm.api.endpoints import Endpoints
from farm.api.protocol_parts.detail_errors import refuse_with_detail
from farm.api.protocol_parts.multipart import spooled
from farm.api.protocols import WireProtocol
from farm.api.schemas import ApiRequest
from farm.api.scopes import RouteScopes
from farm.api.swe_rex import rex_errors
from farm.api.swe_rex.rex_errors import RexError
from farm.api.swe_rex.rex_requests import (
    RexAction,
    RexCommand,
    RexInterrupt,
    RexReadRequest,
    RexSessionEnd,
    RexSessionRequest,
    RexWriteRequest,
)
from farm.api.swe_rex.rex_sandbox import RexSandbox
from farm.api.swe_rex.rex_uploads import read_upload
from farm.callers import Scope, current_caller
from farm.errors import FarmError, Forbidden
from farm.records.lending.borrowed_sandbox import SandboxState, check_borrower
from farm.records.request_values import Request

T = TypeVar("T", bound=Request)

_ONE = "/{reference}"
_UPLOADS = 2
"""Large uploads that are unpacked at a time: each is in memory more than once."""


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._sandboxes = endpoints.farm.sandboxes
        self._uploads = asyncio.Semaphore(_UPLOADS)

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.get("/", lambda request: {"message": "hello world"}),
            endpoints.get(f"{_ONE}/is_alive", self._is_alive),
            self._verb("create_session", RexSessionRequest, RexSandbox.create_session),
            endpoints.route("POST", f"{_ONE}/run_in_session", self._run),
            self._verb("close_session", RexSessionEnd, RexSandbox.close_session),
            self._verb("execute", RexCommand, RexSandbox.execute),
            self._verb("read_file", RexReadRequest, RexSandbox.read_file),
            self._verb("write_file", RexWriteRequest, RexSandbox.write_file),
            endpoints.route("POST", f"{_ONE}/upload", self._upload, takes_body=False),
            endpoints.route("POST", f"{_ONE}/close", self._close, takes_body=False),
        ]

    def _verb(
        self, name: str, kind: type[T], verb: Callable[[RexSandbox, T], Awaitable[Mapping[str, Any]]]
    ) -> BaseRoute:
        async def answer(request: ApiRequest) -> Any:
            wanted = request.parse_body(kind)
            return await _response_of(verb(self._sandbox(request, name), wanted))

        return self._endpoints.route("POST", f"{_ONE}/{name}", answer)

    def _sandbox(self, request: ApiRequest, name: str) -> RexSandbox:
        request_id = request.headers.get("x-request-id", "")
        return RexSandbox(
            self._endpoints, request.path["reference"], f"{name} {request_id}" if request_id else "", request.data
        )

    async def _run(self, request: ApiRequest) -> Any:
        body, sandbox = request.body, self._sandbox(request, "run_in_session")
        if isinstance(body, dict) and body.get("action_type") == "bash_interrupt":
            return await _response_of(sandbox.interrupt(request.parse_body(RexInterrupt)))
        return await _response_of(sandbox.run(request.parse_body(RexAction)))

    def _is_alive(self, request: ApiRequest) -> Mapping[str, Any]:
        """Return whether a sandbox runs. Its client is alive, so this renews the lease."""
        state = self._sandboxes.get(request.path["reference"])
        check_borrower(current_caller(), state.sandbox_id, state.borrower)
        if not state.ended and state.lease_left_s < state.lease_s / 2:
            state = self._sandboxes.renew(state.sandbox_id)
        if state.state is SandboxState.RUNNING:
            return {"is_alive": True, "message": ""}
        message = str(state.ended_error()) if state.ended else f"sandbox {state.sandbox_id} is {state.state}"
        return {"is_alive": False, "message": message}

    async def _upload(self, request: ApiRequest) -> Any:
        body = await spooled(request)
        async with self._uploads:
            try:
                content_type = request.headers.get("content-type", "")
                upload = await self._endpoints.run(read_upload, body, content_type)
            except RexError as error:
                return error.response()
            sandbox = self._sandbox(request, "upload")
            return await _response_of(sandbox.put(upload.path, upload.data, upload.packed))

    async def _close(self, request: ApiRequest) -> Any:
        """End the sandbox. Idempotent."""

        async def stop() -> Mapping[str, Any]:
            await self._endpoints.run(self._sandboxes.stop, request.path["reference"])
            return {}

        return await _response_of(stop())


async def _response_of(doing: Awaitable[Any]) -> Any:
    """Return the result, or the response that makes the client raise the error."""
    try:
        return await doing
    except RexError as error:
        return error.response()
    except Forbidden:
        raise
    except FarmError as error:
        return RexError(rex_errors.PLAIN, str(error)).response()


def _routes(endpoints: Endpoints) -> Sequence[BaseRoute]:
    return _Routes(endpoints).routes()


_USES = (Scope.SUBMIT, Scope.OPERATE)
_VERBS = ("create_session", "run_in_session", "close_session", "execute", "read_file", "write_file", "upload", "close")
_SCOPES: RouteScopes = {
    ("GET", "/"): Scope.READ,
    ("GET", f"{_ONE}/is_alive"): _USES,
    **{("POST", f"{_ONE}/{verb}"): _USES for verb in _VERBS},
}

PROTOCOL = WireProtocol(_routes, refuse_with_detail, _SCOPES)

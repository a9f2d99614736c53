"""The HTTP server of a worker for calls of borrowed sandboxes: `POST /SANDBOX/VERB`, with the sandbox's token.

Only processes of the API call it. An unknown sandbox and a wrong token get the same answer, so guessing reveals
nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from farm.client import serialization
from farm.client.http_errors import ProblemDetails, problem_of
from farm.client.request_checks import checked
from farm.client.sandboxes.node_line import NEEDS_STATE, NOT_HERE
from farm.errors import NotFound, RolloutError, SandboxEnded, ServiceError
from farm.records.lending.sandbox_calls import CALLS, MAX_FILE_BYTES
from workers.lending.lent_sandbox import LentSandbox

MAX_CONNECTIONS = 4096
_MAX_BODY_BYTES = 2 * MAX_FILE_BYTES


class SandboxServer:
    """The application for the sandboxes that this worker holds, by id."""

    def __init__(self, held: Mapping[str, LentSandbox]) -> None:
        self._held = held
        self.app = Starlette(routes=[Route("/{sandbox_id}/{verb}", self._call, methods=["POST"])])

    async def _call(self, request: Request) -> Response:
        if (lent := self._lent(request)) is None:
            return Response(status_code=NOT_HERE)
        try:
            return Response(await _answer(lent, request), media_type="application/json")
        except ClientDisconnect:
            return Response(status_code=499)
        except RolloutError as error:
            problem = ProblemDetails(ServiceError.status, "ServiceError", str(error))
        except Exception as error:
            problem = problem_of(error)
        return Response(problem.body(), problem.status, media_type="application/json")

    def _lent(self, request: Request) -> LentSandbox | None:
        lent = self._held.get(request.path_params["sandbox_id"])
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if lent is None or scheme != "Bearer" or not hmac.compare_digest(token.encode(), lent.token.encode()):
            return None
        return lent


async def _answer(lent: LentSandbox, request: Request) -> bytes:
    kind = CALLS.get(request.path_params["verb"])
    if kind is None:
        raise NotFound(f"a sandbox has no verb {request.path_params['verb']!r:.100}")
    call = checked(kind[0], serialization.parsed(await _body(request)))
    if lent.lost_state and NEEDS_STATE in request.headers:
        raise SandboxEnded(
            f"sandbox {lent.sandbox.sandbox_id} was held by a worker that has ended, and its shells and tools with it"
        )
    call_id = request.headers.get("x-request-id", "")[:200]
    try:
        answer = await lent.answer(call, call_id)
    except RolloutError as error:
        if lent.broken:
            raise SandboxEnded(f"sandbox {lent.sandbox.sandbox_id} broke, and has ended: {error}") from error
        raise
    return serialization.written(answer)


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            raise ServiceError(f"a call may have {_MAX_BODY_BYTES} bytes")
    return bytes(data)

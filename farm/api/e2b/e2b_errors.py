"""Errors in the form of E2B: by status in its REST API, by Connect codes for the agent in a sandbox."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from enum import StrEnum

from starlette.responses import Response

from farm.client import serialization
from farm.client.http_errors import ProblemDetails, problem_of
from farm.errors import (
    Conflict,
    FarmError,
    Forbidden,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    SandboxEnded,
    ServiceError,
)

_NO_SANDBOX = 502
"""The status of E2B's proxy for a missing sandbox."""


_NO_SPACE = 507


class ConnectCode(StrEnum):
    """Codes of the Connect protocol."""

    CANCELED = "canceled"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"


_STATUS: Mapping[ConnectCode, int] = {
    ConnectCode.CANCELED: 499,
    ConnectCode.INVALID_ARGUMENT: 400,
    ConnectCode.DEADLINE_EXCEEDED: 504,
    ConnectCode.NOT_FOUND: 404,
    ConnectCode.ALREADY_EXISTS: 409,
    ConnectCode.PERMISSION_DENIED: 403,
    ConnectCode.RESOURCE_EXHAUSTED: 429,
    ConnectCode.FAILED_PRECONDITION: 400,
    ConnectCode.UNIMPLEMENTED: 501,
    ConnectCode.INTERNAL: 500,
    ConnectCode.UNAVAILABLE: 503,
    ConnectCode.UNAUTHENTICATED: 401,
}
_BY_WORDS: Mapping[str, ConnectCode] = {
    os.strerror(number): code
    for number, code in (
        (errno.ENOENT, ConnectCode.NOT_FOUND),
        (errno.EEXIST, ConnectCode.ALREADY_EXISTS),
        (errno.EACCES, ConnectCode.PERMISSION_DENIED),
        (errno.EPERM, ConnectCode.PERMISSION_DENIED),
        (errno.ENOSPC, ConnectCode.RESOURCE_EXHAUSTED),
        (errno.EDQUOT, ConnectCode.RESOURCE_EXHAUSTED),
    )
}
_BY_KIND: tuple[tuple[type[Exception], ConnectCode], ...] = (
    (InvalidRequest, ConnectCode.INVALID_ARGUMENT),
    (SandboxEnded, ConnectCode.UNAVAILABLE),
    (NotFound, ConnectCode.NOT_FOUND),
    (Conflict, ConnectCode.FAILED_PRECONDITION),
    (Forbidden, ConnectCode.PERMISSION_DENIED),
    (NotAllowed, ConnectCode.UNAUTHENTICATED),
    (Overloaded, ConnectCode.RESOURCE_EXHAUSTED),
    (ServiceError, ConnectCode.UNAVAILABLE),
)


class ConnectError(Exception):
    """An error of the agent's service. `status` is that of a unary response, if more specific than that of its code."""

    def __init__(self, code: ConnectCode, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self._status = status or _STATUS[code]

    @property
    def value(self) -> dict[str, str]:
        """Its JSON form."""
        return {"code": str(self.code), "message": str(self)}

    def response(self) -> Response:
        """Return the response to a unary request."""
        return Response(serialization.written(self.value), self._status, media_type="application/json")


class SandboxMissing(FarmError):
    """The sandbox that a request to its agent names does not exist, or has ended."""

    def response(self) -> Response:
        """Return the response of E2B's proxy."""
        body = {"sandboxId": "", "message": str(self), "code": _NO_SANDBOX}
        return Response(serialization.written(body), _NO_SANDBOX, media_type="application/json")


def missing_sandbox(why: FarmError) -> SandboxMissing:
    """Return the error for a missing sandbox, with the text that clients look for."""
    return SandboxMissing(f"The sandbox was not found: {why}")


def connect_error(error: FarmError) -> ConnectError:
    """Convert an error of the farm to a Connect error."""
    if isinstance(error, SandboxMissing):
        return ConnectError(ConnectCode.UNAVAILABLE, str(error))
    if isinstance(error, InvalidRequest):
        field, message = error.complaints[0]
        return ConnectError(ConnectCode.INVALID_ARGUMENT, f"{field} {message}" if field else message)
    code = next((code for kind, code in _BY_KIND if isinstance(error, kind)), ConnectCode.INTERNAL)
    return ConnectError(code, problem_of(error).message)


def file_error(error: InvalidRequest) -> ConnectError:
    """Return the error about a file; the message ends with the kernel's text."""
    message = error.complaints[0][1]
    code = _BY_WORDS.get(message.rpartition(": ")[2], ConnectCode.INVALID_ARGUMENT)
    return ConnectError(code, message, _NO_SPACE if code is ConnectCode.RESOURCE_EXHAUSTED else 0)


def refuse_with_code(problem: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response of the REST API."""
    message = f"{problem.field} {problem.message}" if problem.field else problem.message
    return Response(
        serialization.written({"code": problem.status, "message": message}), problem.status, headers, "application/json"
    )

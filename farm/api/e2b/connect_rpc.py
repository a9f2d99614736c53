"""The Connect protocol as used by E2B's clients: JSON, without compression, over any version of HTTP; and E2B's errors.

A unary request and its response are JSON. A stream is a sequence of messages, each after five bytes: flags, and its
length. Its last message has the end flag, and the error if there is one.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from farm.api.schemas import ApiRequest
from farm.client import serialization
from farm.client.http_errors import ProblemDetails, problem_of
from farm.client.request_checks import checked
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
from farm.records.request_values import Request

T = TypeVar("T", bound=Request)

UNARY = "application/json"
STREAM = "application/connect+json"
_HEAD = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_MAX_MESSAGE = 8_000_000

_NO_SANDBOX = 502
"""The status of E2B's proxy for a missing sandbox."""
_NO_SPACE = 507


class Message(Request):
    """A message: fields by their JSON names; unknown fields of other releases are ignored, as the protocol requires."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, hide_input_in_errors=True, alias_generator=to_camel, populate_by_name=True
    )


def _decoded(data: Any) -> bytes:
    if not isinstance(data, str):
        raise ValueError("is not base64")
    # JSON allows either base64 alphabet, with or without padding
    plain = data.replace("-", "+").replace("_", "/").rstrip("=")
    return b64decode(plain + "=" * (-len(plain) % 4), validate=True)


Bytes = Annotated[bytes, BeforeValidator(_decoded)]
"""A field of bytes."""


async def unary_message(request: ApiRequest, kind: type[T]) -> T:
    """Return the message of a unary request. Raises ConnectError, and InvalidRequest naming the field."""
    _check_type(request, UNARY)
    data = bytearray()
    async for piece in request.pieces():
        data += piece
        _check_size(len(data))
    return checked(kind, _parsed(bytes(data) or b"{}"))


async def messages(request: ApiRequest, kind: type[T]) -> AsyncIterator[T]:
    """Yield the messages of a stream as they come. Raises as `unary_message`."""
    _check_type(request, STREAM)
    data = bytearray()
    async for piece in request.pieces():
        data += piece
        while len(data) >= _HEAD.size:
            flags, size = _HEAD.unpack_from(data)
            _check_size(size)
            if len(data) < _HEAD.size + size:
                break
            message = bytes(data[_HEAD.size : _HEAD.size + size])
            del data[: _HEAD.size + size]
            if flags & _COMPRESSED:
                raise ConnectError(ConnectCode.UNIMPLEMENTED, "compressed messages are unsupported: send them plain")
            if flags & _END:
                return
            yield checked(kind, _parsed(message))
    if data:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, "the stream ends within a message")


async def only_message(request: ApiRequest, kind: type[T]) -> T:
    """Return the single message of a request that is answered by a stream."""
    async for message in messages(request, kind):
        return message
    raise ConnectError(ConnectCode.INVALID_ARGUMENT, "the request has no message")


def _check_type(request: ApiRequest, wanted: str) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != wanted:
        raise ConnectError(
            ConnectCode.UNIMPLEMENTED, f"content-type {content_type!r:.100} is unsupported: send {wanted}"
        )


def _check_size(n_bytes: int) -> None:
    if n_bytes > _MAX_MESSAGE:
        raise ConnectError(ConnectCode.RESOURCE_EXHAUSTED, f"a message may have {_MAX_MESSAGE} bytes: split it")


def _parsed(data: bytes) -> Any:
    try:
        return serialization.parsed(data)
    except ValueError as error:
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, f"the message is not JSON: {error}") from None


def unary_response(value: Mapping[str, Any]) -> Response:
    """Return the response to a unary request."""
    return Response(serialization.written(value), media_type=UNARY)


def framed(value: Mapping[str, Any]) -> bytes:
    """Encode a message of a stream."""
    return _framed(0, value)


def stream_end(error: ConnectError | None = None) -> bytes:
    """Encode the last message of a stream."""
    return _framed(_END, {} if error is None else {"error": error.value})


def _framed(flags: int, value: Mapping[str, Any]) -> bytes:
    data = json.dumps(value, separators=(",", ":")).encode()
    return _HEAD.pack(flags, len(data)) + data


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

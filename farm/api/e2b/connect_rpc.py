"""The Connect protocol as used by E2B's clients: JSON, without compression, over any version of HTTP.

A unary request and its response are JSON. A stream is a sequence of messages, each after five bytes: flags, and its
length. Its last message has the end flag, and the error if there is one.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from farm.api.e2b.e2b_errors import ConnectCode, ConnectError
from farm.api.schemas import ApiRequest
from farm.client import serialization
from farm.client.request_checks import checked
from farm.records.request_values import Request

T = TypeVar("T", bound=Request)

UNARY = "application/json"
STREAM = "application/connect+json"
_HEAD = struct.Struct(">BI")
_COMPRESSED, _END = 1, 2
_MAX_MESSAGE = 8_000_000


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
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted:
        raise ConnectError(ConnectCode.UNIMPLEMENTED, f"content-type {given!r:.100} is unsupported: send {wanted}")


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

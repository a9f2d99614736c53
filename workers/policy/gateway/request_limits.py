"""The bodies of requests within limits on their size, single and concurrent, and the labels in their headers.

Clients share the sandbox with the policy's programs; a worker runs many rollouts, and none of them may exhaust its
memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.policy.gateway.dialects.model_api import MAX_DEPTH, BadRequest, writable

MAX_BODY_BYTES = 16_000_000
MAX_HELD_BYTES = 2 * MAX_BODY_BYTES
"""Bytes of all concurrent requests of a rollout."""


_MAX_BRACKETS = 500_000
"""Number of brackets in a body: each may become a Python object; millions block the event loop for seconds."""
_LABEL = "x-label-"
"""The prefix of header names that set labels, for programs written for the farm."""
_KNOWN = {
    "session_id": "session",
    "x-session-id": "session",
    "x-claude-code-session-id": "session",
    "conversation_id": "conversation",
    "x-openai-subagent": "subagent",
    "x-agent-id": "agent",
    "x-agent-name": "agent",
    "user-agent": "client",
}
_MAX_LABELS = 16
_MAX_CHARS = 200


class BodyTooLarge(Exception):
    """A request exceeds the size limit."""


class TooManyRequests(Exception):
    """The concurrent requests of a rollout exceed the size limit."""


class HeldBytesLimit:
    """An ASGI wrapper that limits the bytes of a rollout's concurrent requests; raises TooManyRequests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._n_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n_mine = 0

        async def counted() -> Message:
            nonlocal n_mine
            message = await receive()
            n_bytes = len(message.get("body", b""))
            if self._n_held + n_bytes > MAX_HELD_BYTES:
                raise TooManyRequests
            n_mine += n_bytes
            self._n_held += n_bytes
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._n_held -= n_mine


def _unpacked(data: bytes, encoding: str) -> bytearray:
    """Return the decompressed body. Raises BadRequest, BodyTooLarge."""
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"encoding {encoding!r} is not supported: send the body uncompressed or as gzip", status=415)
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        whole = reader.decompress(data, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise BadRequest(f"the request's {encoding} data is corrupt: {error}") from None
    if len(whole) > MAX_BODY_BYTES:
        raise BodyTooLarge
    if not reader.eof:
        raise BadRequest(f"the request's {encoding} data is truncated")
    return bytearray(whole)


async def data_of(request: Request) -> bytearray:
    """Return the bytes of a request. Raises BodyTooLarge, TooManyRequests, ClientDisconnect."""
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise BodyTooLarge
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge
    return data


def encoding_of(request: Request) -> str:
    """Return the compression of a request's bytes; empty if uncompressed."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return "" if encoding == "identity" else encoding


def body_in(data: bytearray, encoding: str) -> dict[str, Any]:
    """Return the JSON object of a request's bytes. Raises BadRequest, BodyTooLarge."""
    if encoding:
        data = _unpacked(bytes(data), encoding)
    if (n_brackets := data.count(b"[") + data.count(b"{")) > _MAX_BRACKETS:
        raise BodyTooLarge
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    if n_brackets > MAX_DEPTH and not writable(body):
        raise BadRequest("the request's JSON is nested too deeply")
    return body


def header_labels(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in a request's headers."""
    result: dict[str, str] = {}
    for name, value in headers.items():
        label = _KNOWN.get(name) or (name.removeprefix(_LABEL) if name.startswith(_LABEL) else "")
        if label and value and len(result) < _MAX_LABELS:
            result[label[:64]] = value[:_MAX_CHARS]
    return result

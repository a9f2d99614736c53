"""Protocols of other systems that the API supports in addition to its own: each a folder here, found by entry point.

A protocol is served below `/NAME/`, and at the root of a port of its own. Its requests use the same keys and the same
limits and change the same store; its errors have the form that its own clients read. The parts that
several protocols have in common are here, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from typing import IO, Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.auth import RouteScopes, guarded
from farm.api.endpoints import Endpoints, LongPoll, Refuse, allowed_methods
from farm.api.schemas import ApiRequest, RequestRejected
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.client.request_checks import HANDLERS
from farm.client.sandboxes.node_line import SentCall
from farm.client.verb_groups import Runs
from farm.errors import Conflict, InvalidRequest, ServiceError, UnknownHandler
from farm.plugins import installed, load
from farm.records.lending.sandbox_calls import CALL_S, CALLS, VERBS
from farm.records.request_values import Request
from farm.records.trajectory import ModelCall, calls_of_segments

PROTOCOLS = "farm.protocols"
"""The group of their entry points."""
PAGE = "web"
"""The first part of the paths of the web page, which no protocol may be named after."""

_POLL_S = 2.0
"""Seconds between two queries of a waiting request. It can be long, as each is notified when its batch ends."""
_TRIES = 50
_MARK = "mark"
_SMALL = 65_536
"""Bytes that are processed on the event loop; more take a thread."""
_STATUS = {("NotAllowed", 403): 400, ("InvalidRequest", 400): 422}
ROW_READERS = frozenset({"answer", "programs", "swe-bench"})
"""Handlers that read a data set's row unchanged, and drop the columns that are not about the problem."""
_CHARS = 32
_MAX_HEAD = 8192
_MAX_FIELDS = 100


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """The routes of a protocol, its form of an error, and the scope of each route by (method, path)."""

    routes: Callable[[Endpoints], Sequence[BaseRoute]]
    refuse: Refuse
    scopes: RouteScopes


@dataclass(frozen=True, slots=True)
class SpokenProtocol:
    """A protocol that is served, by name; also at the root of `port`, if that is not 0."""

    name: str
    protocol: WireProtocol
    port: int = 0


def spoken(name: str, port: int = 0) -> SpokenProtocol:
    """Return an installed protocol. Raises NotFound, with the known names."""
    return SpokenProtocol(name, cast(WireProtocol, load(PROTOCOLS, name)), port)


def application(endpoints: Endpoints, protocol: WireProtocol) -> ASGIApp:
    """Return the ASGI application of one protocol."""

    async def refuse(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "NotFound" if error.status_code == 404 else "NotAllowed"
        route = f"{request.method} {request.url.path}"
        problem = ProblemDetails(error.status_code, kind, f"there is no {ascii(route)[1:-1][:200]}")
        return protocol.refuse(problem, allowed_methods(request))

    routes = guarded(protocol.routes(endpoints.refusing(protocol.refuse)), protocol.scopes, protocol.refuse)
    inner = Starlette(routes=routes, exception_handlers={404: refuse, 405: refuse})
    inner.router.redirect_slashes = False
    return inner


class ProtocolSwitch:
    """Passes a request to the protocol of its port or of the first part of its path, else to the API's own routes."""

    def __init__(self, own: ASGIApp, by_name: Mapping[str, ASGIApp], by_port: Mapping[int, ASGIApp]) -> None:
        self._own = own
        self._by_name = by_name
        self._by_port = by_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, port = scope.get("server") or ("", 0)
        if (app := self._by_port.get(port)) is not None:
            await app(scope, receive, send)
            return
        if scope["path"] in ("/", f"/{PAGE}") and PAGE in self._by_name and _is_browser(scope):
            await RedirectResponse(f"/{PAGE}/", 303)(scope, receive, send)
            return
        name = scope["path"].removeprefix("/").partition("/")[0]
        if (app := self._by_name.get(name)) is not None:
            scope = {**scope, "path": scope["path"][len(name) + 1 :] or "/"}
            await app(scope, receive, send)
            return
        await self._own(scope, receive, send)


def _is_browser(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


async def await_batch(
    endpoints: Endpoints, batch_id: str, wait_s: float, is_disconnected: Callable[[], Awaitable[bool]]
) -> None:
    """Return once a batch has ended; no thread waits for it.

    Raises RequestRejected with 504 if it has not after `wait_s`, and with 503 if this API ends; ClientDisconnect once
    the client has left. The batch continues, and a client that gives up, or whose API is killed, may ask again.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    has_open = endpoints.farm.has_open
    is_open = await endpoints.wait_until(
        LongPoll(batch_id, lambda: has_open(batch_id), lambda is_open: not is_open, wait_s, _POLL_S, is_disconnected)
    )
    if not is_open:
        return
    if asyncio.get_running_loop().time() < deadline:
        closing = f"this API ends, and batch {batch_id} continues: send the same request again"
        raise RequestRejected(ProblemDetails(503, "ServiceError", closing))
    message = f"Processing timed out: batch {batch_id} continues; send the same request again, or cancel it"
    raise RequestRejected(ProblemDetails(504, "ServiceError", message))


class KeptState:
    """State that a protocol keeps between requests, in the store, so that every API process sees it.

    It is a record by name, `{}` before its first change. A name has up to 64 of A-Z, a-z, 0-9, `.`, `_`, `:` and `-`.
    It is stored as a log of records, each written once after the one before it, like the steps of a training run: if
    two API processes change it at the same moment, one is first, and the other starts over from the new record.
    """

    def __init__(self, runs: Runs, name: str) -> None:
        self._runs = runs
        self._name = name

    def read(self) -> Mapping[str, Any]:
        return self._newest()[1]

    def change(self, to: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Replace the record by `to(record)`, and return it. `to` may be called again, and may raise."""
        mark = secrets.token_hex(8)
        for _ in range(_TRIES):
            step, record = self._newest()
            changed = to(record)
            if changed == record:
                return record
            try:
                written = self._runs.record_step(self._name, step + 1, {**changed, _MARK: mark})
            except Conflict:
                continue
            if written.record.get(_MARK) == mark:
                return changed
        raise ServiceError(f"{self._name} was changed by others {_TRIES} times: retry")

    def _newest(self) -> tuple[int, Mapping[str, Any]]:
        recorded = self._runs.recorded_step(self._name)
        if recorded is None:
            return 0, {}
        return recorded.step, {name: value for name, value in recorded.record.items() if name != _MARK}


async def call_sandbox(
    endpoints: Endpoints, reference: str, call: Request, call_id: str = "", needs_state: bool = False
) -> Any:
    """Return the result of a call to a sandbox, by its id or name. Raises as `NodeLine.call`.

    With a `call_id` it is executed once, however often it is sent.
    """
    verb = VERBS[type(call)]
    body = await endpoints.run(serialization.written, call)
    sent = SentCall(verb, body, getattr(call, "timeout_s", CALL_S), call_id, needs_state)
    data = await endpoints.nodes.call(reference, sent)
    kind: Any = CALLS[verb][1]
    if len(data) > _SMALL:
        return await endpoints.run(serialization.read, kind, data)
    return serialization.read(kind, data)


def refuse_with_detail(problem: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response: the complaints by field for a refused body, else one text."""
    status = _STATUS.get((problem.kind, problem.status), problem.status)
    detail: Any = problem.message
    if problem.kind == "InvalidRequest" and problem.field:
        faults = [(problem.field, problem.message), *problem.more]
        detail = [{"type": "value_error", "loc": _location(field), "msg": message} for field, message in faults]
    return Response(serialization.written({"detail": detail}), status, headers, "application/json")


def _location(field: str) -> list[str]:
    return ["body"] if field in ("body", "request") else ["body", *field.split(".")]


def known_handler(name: str, others: Collection[str] = ()) -> str:
    """Return the name of a handler. Raises UnknownHandler, naming the known ones, and `others`."""
    if name in installed(HANDLERS):
        return name
    known = ", ".join(sorted({*others, *installed(HANDLERS)}))
    raise UnknownHandler(f"Invalid dataset type or function not registered: {name!r}; known are: {known}")


def columns_without(row: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return the row without some columns."""
    return {name: value for name, value in row.items() if name not in dropped}


def reasoning_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reasoning and the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(message.get("reasoning_content") or message.get("reasoning") or ""), str(content or "")


def longest_row(calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Return the calls of the training row with the most sampled tokens; all calls where ids are unknown.

    A client joins the tokens of an answer to one row, so each call must begin with those before it.
    """
    rows = calls_of_segments(calls)
    return max(rows, key=lambda row: sum(call.n_response_tokens for call in row)) if rows else calls


def exact_tokens(call: ModelCall) -> tuple[list[int], list[int], list[float]]:
    """Return the ids of prompt and answer, and the log-probabilities, of a call that is `token_exact`."""
    assert call.prompt_ids is not None
    assert call.response_ids is not None
    assert call.response_logprobs is not None
    return call.prompt_ids.tolist(), call.response_ids.tolist(), call.response_logprobs.tolist()


def content_hash(value: Any) -> str:
    """Return 32 hexadecimal digits that are equal for equal JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARS]


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form: its bytes, and the file name, "" for a value."""

    data: bytes
    file_name: str = ""


async def spooled(request: ApiRequest) -> IO[bytes]:
    """Return the body of a request as an anonymous file. Raises RequestRejected for one that is too large."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - its reader closes it
    try:
        await _fill(file, request.pieces())
    except BaseException:
        file.close()
        raise
    return file


async def _fill(file: IO[bytes], pieces: AsyncIterator[bytes]) -> None:
    n_bytes = 0
    async for piece in pieces:
        n_bytes += len(piece)
        if n_bytes > serialization.MAX_BODY_BYTES:
            raise RequestRejected(ProblemDetails(413, "InvalidRequest", serialization.TOO_LARGE, "body"))
        file.write(piece)
    file.seek(0)


def form_fields(body: IO[bytes], content_type: str) -> Mapping[str, FormField]:
    """Return the fields of a form by name, of repeated names the first. Raises InvalidRequest for a malformed form."""
    return dict(reversed(form_parts(body, content_type)))


def form_parts(body: IO[bytes], content_type: str) -> Sequence[tuple[str, FormField]]:
    """Return the fields of a form with their names, in order. Raises InvalidRequest for a malformed form."""
    head = _headers(f"content-type: {content_type}".encode())
    boundary = _parameter(head, "content-type", "boundary")
    if head.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise InvalidRequest("must be multipart/form-data, with its boundary", field="body")
    size = body.seek(0, 2)
    if not size:
        raise InvalidRequest("is empty", field="body")
    fields: list[tuple[str, FormField]] = []
    with mmap.mmap(body.fileno(), size, access=mmap.ACCESS_READ) as data:
        for start, end in _parts(data, b"--" + boundary.encode()):
            cut = data.find(b"\r\n\r\n", start, min(end, start + _MAX_HEAD))
            if cut < 0:
                raise InvalidRequest("has a part without headers", field="body")
            head = _headers(data[start:cut])
            name = head.get_param("name", header="content-disposition")
            if isinstance(name, str):
                file_name = _parameter(head, "content-disposition", "filename")
                fields.append((name, FormField(data[cut + 4 : end], file_name)))
    return fields


def _parts(data: mmap.mmap, delimiter: bytes) -> list[tuple[int, int]]:
    """Return the begin and end of each part of a form, its headers included."""
    parts: list[tuple[int, int]] = []
    # there may be a preamble before the first boundary
    offset = 0 if data[: len(delimiter)] == delimiter else data.find(b"\r\n" + delimiter) + 2
    while data[offset : offset + len(delimiter)] == delimiter:
        start = offset + len(delimiter)
        if data[start : start + 2] == b"--":
            return parts
        end = data.find(b"\r\n" + delimiter, start)
        if data[start : start + 2] != b"\r\n" or end < 0:
            break
        if len(parts) == _MAX_FIELDS:
            raise InvalidRequest(f"has more than {_MAX_FIELDS} fields", field="body")
        parts.append((start + 2, end))
        offset = end + 2
    raise InvalidRequest("is an incomplete form: a boundary is missing", field="body")


def _parameter(head: Message, header: str, name: str) -> str:
    """Return a parameter of a header, "" if it has none. Raises InvalidRequest for an unknown encoding."""
    try:
        return collapse_rfc2231_value(head.get_param(name, "", header=header)).rstrip()
    except ValueError as error:
        raise InvalidRequest(f"has an unreadable {name}: {error}", field="body") from None


def _headers(data: bytes) -> Message:
    return HeaderParser().parsestr(data.decode("utf-8", "replace"))

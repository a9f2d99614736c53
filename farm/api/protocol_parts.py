"""Common parts of the protocols of other systems."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.responses import Response

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.schemas import RequestRejected
from farm.client import serialization
from farm.client.http_errors import ProblemDetails
from farm.client.request_checks import HANDLERS
from farm.client.sandboxes.node_line import SentCall
from farm.client.verb_groups import Runs
from farm.errors import Conflict, ServiceError, UnknownHandler
from farm.plugins import installed
from farm.records.lending.sandbox_calls import CALL_S, CALLS, VERBS
from farm.records.request_values import Request

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


async def await_batch(
    endpoints: Endpoints, batch_id: str, wait_s: float, is_disconnected: Callable[[], Awaitable[bool]]
) -> None:
    """Return once a batch has ended; no thread waits for it.

    Raises RequestRejected with 504 if it has not after `wait_s`, and with 503 if this API ends; ClientDisconnect once
    the client has left. The batch continues, and a client that gives up, or whose API is killed, may ask again.
    """
    deadline = asyncio.get_running_loop().time() + wait_s
    has_open = endpoints.farm.has_open
    is_open: bool = await endpoints.wait_until(
        LongPoll(batch_id, lambda: has_open(batch_id), lambda is_open: not is_open, wait_s, _POLL_S, is_disconnected)
    )
    if not is_open:
        return
    if asyncio.get_running_loop().time() < deadline:
        ends = f"this API ends, and batch {batch_id} continues: send the same request again"
        raise RequestRejected(ProblemDetails(503, "ServiceError", ends))
    late = f"Processing timed out: batch {batch_id} continues; send the same request again, or cancel it"
    raise RequestRejected(ProblemDetails(504, "ServiceError", late))


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
        detail = [{"type": "value_error", "loc": _place(field), "msg": message} for field, message in faults]
    return Response(serialization.written({"detail": detail}), status, headers, "application/json")


def _place(field: str) -> list[str]:
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


def content_hash(value: Any) -> str:
    """Return 32 hexadecimal digits that are equal for equal JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARS]

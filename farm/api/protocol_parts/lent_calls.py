"""Calls to borrowed sandboxes by protocols."""

from __future__ import annotations

from typing import Any

from farm.api.endpoints import Endpoints
from farm.client import serialization
from farm.client.sandboxes.node_line import SentCall
from farm.records.lending.sandbox_calls import CALL_S, CALLS, VERBS
from farm.records.request_values import Request

_SMALL = 65_536
"""Bytes that are processed on the event loop; more take a thread."""


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

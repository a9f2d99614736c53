"""Requests that are answered once a batch has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.schemas import RequestRejected
from farm.client.http_errors import ProblemDetails

_POLL_S = 2.0
"""Seconds between two queries of a waiting request. It can be long, as each is notified when its batch ends."""


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
        ends = f"this API ends, and batch {batch_id} goes on: send the same request again"
        raise RequestRejected(ProblemDetails(503, "ServiceError", ends))
    late = f"Processing timed out: batch {batch_id} goes on; send the same request again, or cancel it"
    raise RequestRejected(ProblemDetails(504, "ServiceError", late))

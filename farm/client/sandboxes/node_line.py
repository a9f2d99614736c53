"""Calls to borrowed sandboxes, sent to the worker that holds each; the store gives the address for an id.

Addresses are cached while they work: if a worker does not answer or does not hold the sandbox, the row is read again. A
call that was sent and not answered is resent with its id and executed only once.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx2

from farm.callers import current_caller
from farm.client.http_errors import error_of
from farm.errors import Overloaded, ServiceError
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, SandboxAddress, check_borrower

NOT_HERE = 421
"""The status if the worker does not hold the sandbox, or the token belongs to another one."""
NEEDS_STATE = "x-needs-state"
"""The header of a call that depends on the state of earlier calls, such as a shell's."""
_MOST_KNOWN = 10_000
_CONNECT_S = 60.0
"""Connect timeout in seconds: the farm notices an unreachable node about as fast. With a shorter timeout a busy machine
counts as unreachable, and all of its calls start again at once."""
_SLACK_S = 60.0
"""Seconds to wait for an answer beyond the time limit of a call."""
_PATIENCE_S = 30.0
"""Seconds of retries to a worker that does not answer; a restart takes a few seconds."""
_ROOM_S = 20.0
_PAUSE_S = (0.05, 0.5)
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=1000, keepalive_expiry=60.0)

FindAddress = Callable[[str], Awaitable[tuple[BorrowedSandbox, SandboxAddress | None]]]
"""Reads a sandbox, by id or name, and its address from the store."""


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call as it is sent: its verb, its JSON body, and its time limit.

    With a `call_id` it is executed once however often it is sent. If it `needs_state` and another worker now holds the
    sandbox, whose shells and tools are new, it is refused as after the sandbox's end.
    """

    verb: str
    body: bytes
    timeout_s: float
    call_id: str = ""
    needs_state: bool = False


class NodeLine:
    """Sends calls, on the event loop of the first call."""

    def __init__(self, find: FindAddress) -> None:
        self._find = find
        self._known: OrderedDict[str, SandboxAddress] = OrderedDict()
        self._client: httpx2.AsyncClient | None = None

    async def call(self, reference: str, call: SentCall) -> bytes:
        """Return the JSON of the result.

        Raises SandboxEnded, NotFound, Forbidden, the sandbox's own errors, and ServiceError if its node does not
        answer.
        """
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + _PATIENCE_S, _PAUSE_S[0]
        call_id = call.call_id or secrets.token_hex(16)
        sent_to = reason = ""
        while True:
            # read again before giving up: by now the farm may know that the sandbox has ended, and why
            address = await self._address(reference)
            if sent_to not in ("", address.url):
                # the worker that knew if it was executed is gone
                raise ServiceError(
                    f"sandbox {address.sandbox_id}: its worker on node {address.node} ended during the call, which may "
                    "have been executed; its shells start again"
                )
            if reason and loop.time() > deadline:
                raise ServiceError(
                    f"sandbox {address.sandbox_id}: {reason}; set FARM_NODE_ADDRESS there if it never did"
                )
            try:
                response = await self._sent(address, call, call_id)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                reason = f"its node {address.node} cannot be reached at {address.url} ({type(error).__name__})"
            except httpx2.TransportError as error:
                reason = f"its node {address.node} gave no answer at {address.url} ({type(error).__name__})"
                sent_to = address.url
            else:
                if response.is_success:
                    return response.content
                if response.status_code != NOT_HERE:
                    raise error_of(response.content) or ServiceError(f"{address.url} is not a node of this farm")
                reason = f"its node {address.node} does not have it"
            self._known.pop(address.sandbox_id, None)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def _address(self, reference: str) -> SandboxAddress:
        if (known := self._known.get(reference)) is not None:
            self._known.move_to_end(reference)
            check_borrower(current_caller(), known.sandbox_id, known.borrower)
            return known
        deadline = asyncio.get_running_loop().time() + _ROOM_S
        while True:
            state, address = await self._find(reference)
            check_borrower(current_caller(), state.sandbox_id, state.borrower)
            if state.ended:
                raise state.ended_error()
            if address is not None:
                break
            if asyncio.get_running_loop().time() > deadline:
                raise Overloaded(f"sandbox {state.sandbox_id} is {state.state}: it cannot be called yet")
            await asyncio.sleep(_PAUSE_S[1])
        # by id: a name may later belong to another sandbox
        self._known[address.sandbox_id] = address
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return address

    async def _sent(self, address: SandboxAddress, call: SentCall, call_id: str) -> httpx2.Response:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                trust_env=False, transport=httpx2.AsyncHTTPTransport(limits=_LIMITS, trust_env=False)
            )
        headers = {
            "authorization": f"Bearer {address.token}",
            "content-type": "application/json",
            "x-request-id": call_id,
            **({NEEDS_STATE: "1"} if call.needs_state else {}),
        }
        return await self._client.post(
            f"{address.url}/{address.sandbox_id}/{call.verb}",
            content=call.body,
            headers=headers,
            timeout=httpx2.Timeout(call.timeout_s + _SLACK_S, connect=_CONNECT_S, pool=None),
        )

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

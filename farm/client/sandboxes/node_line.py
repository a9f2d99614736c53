"""The line to the nodes: calls to borrowed sandboxes, sent to the worker that holds each, found by the id alone.

Addresses are remembered for as long as they are right: a worker that is not there, or has not that sandbox, means that
the row is read again. A call that was sent and not answered is sent again under its id, and is not done twice.
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
"""The status of a worker's answer if it does not hold the sandbox, or the token is another's."""
NEEDS_STATE = "x-needs-state"
"""The header of a call that the state of earlier calls, as a shell's, is needed for."""
_MOST_KNOWN = 10_000
_CONNECT_S = 60.0
"""Seconds for a connection: the farm notices a node that is away as soon. A shorter time takes a busy machine for one,
and has all of its calls begin again at one moment."""
_SLACK_S = 60.0
"""Seconds beyond its time limit that the answer of a call is waited for."""
_PATIENCE_S = 30.0
"""Seconds for which a worker that does not answer is asked again; one that is restarted is back within a few."""
_ROOM_S = 20.0
_PAUSE_S = (0.05, 0.5)
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=1000, keepalive_expiry=60.0)

FindAddress = Callable[[str], Awaitable[tuple[BorrowedSandbox, SandboxAddress | None]]]
"""A function that reads a sandbox, by id or name, and its address from the store."""


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call as it is sent: its verb, the JSON of its body, and how long it may take.

    One with a `call_id` is done once however often it is sent. One that `needs_state` is refused as after the sandbox's
    end where its shells and tools began anew, since another worker holds it.
    """

    verb: str
    body: bytes
    timeout_s: float
    call_id: str = ""
    needs_state: bool = False


class NodeLine:
    """Sends calls, on the event loop of the first."""

    def __init__(self, find: FindAddress) -> None:
        self._find = find
        self._known: OrderedDict[str, SandboxAddress] = OrderedDict()
        self._client: httpx2.AsyncClient | None = None

    async def call(self, reference: str, call: SentCall) -> bytes:
        """Return the JSON of the result.

        Raises SandboxEnded, NotFound, Forbidden, what the sandbox complains of, and ServiceError if its node gives no
        answer.
        """
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + _PATIENCE_S, _PAUSE_S[0]
        call_id = call.call_id or secrets.token_hex(16)
        sent_to = why = ""
        while True:
            # read again before it is given up: by then the farm may know that the sandbox has ended, and why
            address = await self._address(reference)
            if sent_to not in ("", address.url):
                # the worker that remembers whether it was done is not there any more
                raise ServiceError(
                    f"sandbox {address.sandbox_id}: its worker on node {address.node} ended during the call, which may "
                    "have been done; its shells begin anew"
                )
            if why and loop.time() > deadline:
                raise ServiceError(f"sandbox {address.sandbox_id}: {why}; set FARM_NODE_ADDRESS there if it never did")
            try:
                response = await self._sent(address, call, call_id)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                why = f"its node {address.node} cannot be reached at {address.url} ({type(error).__name__})"
            except httpx2.TransportError as error:
                why = f"its node {address.node} gave no answer at {address.url} ({type(error).__name__})"
                sent_to = address.url
            else:
                if response.is_success:
                    return response.content
                if response.status_code != NOT_HERE:
                    raise error_of(response.content) or ServiceError(f"{address.url} is no node of this farm")
                why = f"its node {address.node} does not have it"
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
        # a name may come to stand for another sandbox
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

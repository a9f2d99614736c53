"""Make services of one sandbox, such as a web server that a policy started, available in another sandbox.

For each address (TCP or Unix socket) at which the first sandbox listens, the relay listens at the same address in the
second one and forwards connections. The sandboxes share nothing else: no processes, no files, and no network unless
both have one. A server at a Unix socket sees the user of the connecting program, because it may check that user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from farm.errors import SandboxError
from workers.sandboxes.isolation.owners.credentials import shown_outside
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.sandbox import NodeSandbox

Address: TypeAlias = tuple[Any, ...]
"""`("tcp", HOST, PORT)`, `("tcp6", HOST, PORT)` or `("unix", PATH)`."""

log = logging.getLogger(__name__)

_MOST_ADDRESSES = 64
_MOST_CONNECTIONS = 256
_CHUNK = 1 << 16
_ANSWER_S = 30.0
_PEER = struct.Struct("iII")


async def services(sandbox: NodeSandbox) -> list[Address]:
    """Return the addresses at which a sandbox listens, except those of the farm's own tools. Raises SandboxError."""
    messages = await _ask(sandbox, "list", ())
    addresses: list[list[Any]] = next((message["addresses"] for message, _ in messages if "addresses" in message), [])
    return [tuple(address) for address in addresses][:_MOST_ADDRESSES]


@asynccontextmanager
async def relayed(serving: NodeSandbox, other: NodeSandbox) -> AsyncIterator[list[Address]]:
    """Relay the services of one sandbox to the other while the block runs; yields the relayed addresses.

    If both have the node's network, TCP services are reachable in any case. Addresses that are in use are skipped.
    """
    addresses = await services(serving)
    if serving.target()["network"] and other.target()["network"]:
        addresses = [address for address in addresses if address[0] == "unix"]
    listeners = {}
    for message, descriptors in await _ask(other, "listen", addresses) if addresses else []:
        for descriptor in descriptors:
            listeners[tuple(message["address"])] = socket.socket(fileno=descriptor)
    relay = _Relay(serving)
    try:
        for address, listener in listeners.items():
            listener.setblocking(False)
            relay.begin(relay.accept(address, listener))
        yield list(listeners)
    finally:
        await relay.close()
        for listener in listeners.values():
            listener.close()


class _Relay:
    def __init__(self, serving: NodeSandbox) -> None:
        self._serving = serving
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(_MOST_CONNECTIONS)

    def begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def accept(self, address: Address, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except BaseException:
                self._free.release()
                raise
            accepted.setblocking(False)
            self.begin(self._connection(address, accepted))

    async def _connection(self, address: Address, accepted: socket.socket) -> None:
        with accepted, contextlib.ExitStack() as opened:
            try:
                for _, descriptors in await _ask(self._serving, "connect", [(*address, *_user(address, accepted))]):
                    for descriptor in descriptors:
                        inside = opened.enter_context(socket.socket(fileno=descriptor))
                        inside.setblocking(False)
                        await asyncio.gather(_pass_on(accepted, inside), _pass_on(inside, accepted))
            except (OSError, SandboxError) as error:
                log.debug("Connection to %s of sandbox %s ended: %s", address, self._serving.sandbox_id, error)
            finally:
                self._free.release()


def _user(address: Address, accepted: socket.socket) -> tuple[int, ...]:
    """Return the user and group of a Unix socket's peer, as its sandbox numbers them; empty for root."""
    if address[0] != "unix":
        return ()
    # the peer may have ended
    with contextlib.suppress(OSError):
        peer = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, *_ = _PEER.unpack(peer)
        ids = shown_outside(pid) if pid else None
        return ids if ids and any(ids) else ()
    return ()


async def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, _CHUNK):
        await loop.sock_sendall(sink, data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


async def _ask(
    sandbox: NodeSandbox, action: str, addresses: Sequence[Address]
) -> list[tuple[dict[str, Any], list[int]]]:
    job = {"do": "sockets", "action": action, "target": sandbox.target(), "addresses": addresses}
    replies = fork_client().request(job, [])
    messages: list[tuple[dict[str, Any], list[int]]] = []
    try:
        async with asyncio.timeout(_ANSWER_S):
            while (reply := await replies.next())[0]:
                messages.append(reply)
    except TimeoutError:
        raise SandboxError(
            f"sandbox {sandbox.sandbox_id}: its sockets were not listed within {_ANSWER_S:g} s"
        ) from None
    finally:
        replies.close()
    for message, _ in messages:
        if message.get("gone"):
            raise SandboxError(f"sandbox {sandbox.sandbox_id} is gone")
        if reason := message.get("error"):
            raise SandboxError(f"sandbox {sandbox.sandbox_id}: its sockets cannot be used: {reason}")
    return messages

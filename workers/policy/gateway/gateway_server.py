"""The gateway's server: one per rollout, on a Unix socket in its sandbox's folder, in the worker's event loop.

Separate sockets isolate rollouts: a sandbox cannot reach another's, whatever key it guesses. The key matters if a TCP
port is open as well.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.policy.gateway.app import SILENCE_S, application
from workers.policy.gateway.calls import GatewayCalls

SOCKET = "gateway.sock"
MAX_CONNECTIONS = 256
"""Connections per rollout; further ones are closed, as the policy's programs can reach the socket too."""
_CLOSE_S = 5.0
# Clients keep connections open throughout, and all of them belong to one rollout.
_KEEP_ALIVE_S = 86_400


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a rollout's gateway: its key, and the port of 127.0.0.1 if one was opened."""

    key: str
    port: int | None = None

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients; those of Anthropic use it without the `/v1`."""
        return f"http://127.0.0.1:{self.port}/t/{self.key}/v1"


@asynccontextmanager
async def gateway(
    calls: GatewayCalls, folder: Path | None = None, *, tcp: bool = False, silence_s: float = SILENCE_S
) -> AsyncIterator[Address]:
    """Answer a rollout's calls in the block; its end aborts running ones, and waits until all answers are recorded.

    The socket is created in `folder`. Raises OSError if that fails.
    """
    key = secrets.token_urlsafe(24)
    listeners = [_unix(folder / SOCKET)] if folder is not None else []
    port = None
    if tcp:
        listeners.append(_tcp())
        port = listeners[-1].getsockname()[1]
    try:
        async with listening(application(calls, key, silence_s), listeners):
            yield Address(key, port)
    finally:
        await calls.settle()


def _tcp() -> socket.socket:
    """Return a socket on a free port of 127.0.0.1."""
    # Without the protocol number, asyncio leaves Nagle's algorithm on, which delays each answer by 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.bind(("127.0.0.1", 0))
    except BaseException:
        listener.close()
        raise
    return listener


def _unix(path: Path) -> socket.socket:
    """Return a Unix socket at a path of any length. Its folder's mode controls access; the socket itself admits all."""
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # The kernel's limit is 107 bytes.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        _let_all_connect(path.name, folder)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


def _let_all_connect(name: str, folder: int) -> None:
    """Make the socket writable for all, but not a file that the sandbox may have put in its place."""
    made = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{made}").chmod(0o777)
    finally:
        os.close(made)


class _Connection(H11Protocol):
    """A connection, aborted at once if there are too many."""

    def __init__(self, most: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most = most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()


@asynccontextmanager
async def listening(
    app: ASGIApp, listeners: Sequence[socket.socket], max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[None]:
    """Serve on the running event loop, without uvicorn's own, until the block ends."""
    config = uvicorn.Config(
        app,
        http=partial(_Connection, max_connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        # Otherwise malformed requests would fill the worker's log.
        log_level="error",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Its own loop wakes ten times a second, for signals and the time.
    await server.startup(list(listeners))
    try:
        yield
    finally:
        await _close(server)


async def _close(server: uvicorn.Server) -> None:
    """Close all connections; calls in progress are cancelled as if their clients had disconnected."""
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_CLOSE_S)
    for task in server.server_state.tasks:
        task.cancel()

"""Listening: a server for each rollout, on a Unix socket in its sandbox's own folder, within the worker's event loop.

One server each and not one for all, as the socket is then the wall between rollouts: from inside a sandbox no other's
can be reached, whatever key is guessed. The key matters where a TCP port is opened besides.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.policy.gateway.app import SILENCE_S, application
from workers.policy.gateway.calls import Calls

SOCKET = "gateway.sock"
MAX_CONNECTIONS = 256
"""Of one rollout. Who opens more is cut off: the policy's programs reach the socket as well as the agent does."""
_CLOSE_S = 5.0
# clients keep connections for as long as they live, and these are ours alone
_KEEP_ALIVE_S = 86_400


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rollout's gateway is: its key, and the port of 127.0.0.1 if one was opened."""

    key: str
    port: int | None = None

    @property
    def url(self) -> str:
        """The base URL of OpenAI's clients; those of Anthropic take it without the `/v1`."""
        return f"http://127.0.0.1:{self.port}/t/{self.key}/v1"


@asynccontextmanager
async def gateway(
    calls: Calls, folder: Path | None = None, *, tcp: bool = False, silence_s: float = SILENCE_S
) -> AsyncIterator[Address]:
    """Answer a rollout's calls until the block ends, which cuts those that still run; what was answered is recorded.

    `folder` is where the socket is made; OSError if it cannot be.
    """
    key = secrets.token_urlsafe(24)
    listeners = [_unix(folder / SOCKET)] if folder is not None else []
    port = None
    if tcp:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        port = listeners[-1].getsockname()[1]
    try:
        async with _listening(application(calls, key, silence_s), listeners):
            yield Address(key, port)
    finally:
        await calls.settle()


def _unix(path: Path) -> socket.socket:
    """A Unix socket at a path of any length. Its folder says who may reach it, and each of those may connect."""
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # the kernel takes no more than 107 bytes
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        _let_all_connect(path.name, folder)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


def _let_all_connect(name: str, folder: int) -> None:
    """Change the mode of the socket, and of nothing that the sandbox may have put in its place."""
    made = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{made}").chmod(0o777)
    finally:
        os.close(made)


class _Connection(H11Protocol):
    """One of so many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()


@asynccontextmanager
async def _listening(app: ASGIApp, listeners: Sequence[socket.socket]) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        # else whoever sends rubbish fills the worker's log
        log_level="error",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # its own loop wakes ten times a second, to look for signals and to write the time
    await server.startup(list(listeners))
    try:
        yield
    finally:
        await _close(server)


async def _close(server: uvicorn.Server) -> None:
    """Hang up: for a call under way it is as if its client had."""
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_CLOSE_S)
    for task in server.server_state.tasks:
        task.cancel()

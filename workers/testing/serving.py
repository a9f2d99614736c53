"""Serves a web application on a free port: in the foreground, or in a thread for a test.

The application finds the request's connection in its scope, `scope["state"]["transport"]`, so that it can cut it like a
network failure; ASGI has no interface for that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

_START_S = 30.0
_KEEP_ALIVE_S = 5.0
_GRACE_PERIOD_S = 5
"""Seconds that running calls may take when the server ends."""


class _Protocol(H11Protocol):
    """Stores its transport in the state of every request of the connection."""

    def __init__(self, config: uvicorn.Config, server_state: Any, app_state: dict[str, Any], **rest: Any) -> None:
        super().__init__(config, server_state, {**app_state}, **rest)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state["transport"] = transport


class _Server(uvicorn.Server):
    """Signals when it listens. Idle connections are closed after `keep_alive_s`."""

    def __init__(self, app: Starlette, listening: Callable[[], None], keep_alive_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_PERIOD_S,
        )
        # Fractions of a second are as good; only the annotation asks for whole ones.
        config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    # With TCP's protocol number, or asyncio leaves Nagle's algorithm on, which delays every answer by 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener, f"http://{host}:{listener.getsockname()[1]}"


def serve(
    app: Starlette, host: str, port: int, listening: Callable[[str], None], *, keep_alive_s: float = _KEEP_ALIVE_S
) -> None:
    """Serve until a signal ends it; `listening` gets the URL once connections are accepted."""
    listener, url = _bind(host, port)
    with listener:
        _Server(app, lambda: listening(url), keep_alive_s).run(sockets=[listener])


@contextmanager
def serving(app: Starlette, *, keep_alive_s: float = _KEEP_ALIVE_S) -> Iterator[str]:
    """Yield the URL of an application that a thread serves until the block ends."""
    listener, url = _bind("127.0.0.1", 0)
    ready = threading.Event()
    server = _Server(app, ready.set, keep_alive_s)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    with listener:
        thread.start()
        if not ready.wait(_START_S):
            raise RuntimeError(f"the application does not listen after {_START_S} s")
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(_START_S)

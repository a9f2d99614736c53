"""Serves a web application on a free port: in the foreground, or in a thread for as long as a test needs it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

_START_S = 30.0


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, app: Starlette, listening: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener, f"http://{host}:{listener.getsockname()[1]}"


def serve(app: Starlette, host: str, port: int, listening: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `listening` is given the URL once connections are taken."""
    listener, url = _bind(host, port)
    with listener:
        _Server(app, lambda: listening(url)).run(sockets=[listener])


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The URL of an application that is served by a thread until the block ends."""
    listener, url = _bind("127.0.0.1", 0)
    ready = threading.Event()
    server = _Server(app, ready.set)
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

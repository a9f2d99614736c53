"""Listening: one API process, until it is told to end."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from farm.api.app import application
from farm.api.desk import Desk
from farm.api.guard import is_loopback
from farm.errors import InvalidRequest
from farm.service import Service

PATIENCE_S = 5.0
"""With a database that is away; then the client is told so, and waits by itself. A thread has better to do."""
_GRACE_S = 10
"""What is being answered may take when the process ends."""
# longer than clients keep a connection that they do not use, or they find it closed when they ask
_KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """Says when it listens, and when it ends lets nobody wait."""

    def __init__(self, desk: Desk, key: str, listening: Callable[[], None]) -> None:
        config = uvicorn.Config(
            application(desk, key),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        self._desk = desk
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._desk.close()
        await super().shutdown(sockets)


def bind(host: str, port: int, key: str) -> socket.socket:
    """A socket to serve at. Raises InvalidRequest for an address that others reach while there is no key, OSError."""
    if not key and not is_loopback(host):
        raise InvalidRequest("set FARM_API_KEY to listen where other machines can ask", field="host")
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # named as TCP, or asyncio leaves Nagle's algorithm on, which holds every answer back for 40 ms
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Where it is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(service: Service, listener: socket.socket, key: str, listening: Callable[[], None]) -> None:
    """Answer until a signal says to end; what is being answered then is answered."""
    Server(Desk(service), key, listening).run(sockets=[listener])

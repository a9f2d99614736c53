"""Listening sockets, bound before anything else is started, so that a port in use is one clear error."""

from __future__ import annotations

import socket

from farm.errors import NotAllowed


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to an address; port 0 takes a free one. Raises NotAllowed if it cannot be bound."""
    try:
        return _bound(host, port)
    except OSError as error:
        raise NotAllowed(f"cannot listen at {host} port {port}: {error.strerror}; choose another --port") from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # explicitly TCP: else asyncio leaves Nagle's algorithm on, which delays every answer by 40 ms
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener

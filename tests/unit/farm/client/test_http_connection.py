"""The wait for an API that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from farm.client.http_connection import ApiConnection
from farm.errors import FarmUnreachable, StoreUnavailable

SHORT_S = 0.02
"""Less than the pause before a request is sent again; ten times as long is more."""


@contextmanager
def api(*answers: bytes) -> Iterator[str]:
    """A server that returns these answers, one per request; an empty one closes the connection."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not (answer := left.pop(0)):
                return
            self.send_response(200 if answer == b"[]" else 503)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(connection: ApiConnection) -> list[str]:
    return connection.get(list[str], "/v1/batches")


def test_client_waits_longer_for_an_api_that_has_answered() -> None:
    with api(b"[]", b"", b"[]") as url:
        connection = ApiConnection(url, patience_s=SHORT_S)
        assert ask(connection) == []
        assert ask(connection) == []
        connection.close()


def test_address_that_never_answered_fails_early() -> None:
    with api(b"", b"[]") as url:
        connection = ApiConnection(url, patience_s=SHORT_S)
        with pytest.raises(FarmUnreachable):
            ask(connection)
        connection.close()


def test_reported_store_fault_is_waited_for_with_the_same_timeout() -> None:
    away = b'{"error": {"kind": "StoreUnavailable", "message": "the database does not answer"}}'
    with api(b"[]", away, b"[]") as url:
        connection = ApiConnection(url, patience_s=SHORT_S)
        assert ask(connection) == []
        with pytest.raises(StoreUnavailable):
            ask(connection)
        connection.close()

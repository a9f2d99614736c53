"""The farm's metrics over HTTP, for a Prometheus that sends the farm's key: `authorization: credentials_file`."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

_REQUEST_S = 30.0


def server(listener: socket.socket, numbers: CollectorRegistry, key: str) -> WSGIServer:
    """Return a server of the metrics on a listening socket; the caller runs its `serve_forever`."""
    made = _Server(listener.getsockname()[:2], _Request, bind_and_activate=False)
    made.socket.close()
    made.socket = listener
    made.server_name, made.server_port = listener.getsockname()[:2]
    made.setup_environ()
    made.server_activate()
    made.set_app(_guarded(make_wsgi_app(numbers), f"Bearer {key}"))
    return made


def _guarded(app: WSGIApplication, expected: str) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        shown = str(environ.get("HTTP_AUTHORIZATION", ""))
        # compared as received: a header may hold any byte
        if hmac.compare_digest(shown.encode("latin-1"), expected.encode()):
            return app(environ, respond)
        respond("401 Unauthorized", [("content-type", "text/plain; charset=utf-8"), ("www-authenticate", "Bearer")])
        return [b"these numbers want the farm's key: send `Authorization: Bearer KEY`\n"]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Request(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""

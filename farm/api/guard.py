"""Who may ask the API: whoever has the key; without one, programs of this machine, but no web page that they show."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.desk import refusal
from farm.problems import Problem

_NO_KEY = Problem(401, "NotAllowed", "the API wants its key: set FARM_API_KEY, or send `Authorization: Bearer KEY`")
_NOT_HERE = Problem(403, "NotAllowed", "without FARM_API_KEY the API is asked as 127.0.0.1 or localhost alone")


class Guard:
    """Lets through what is allowed, and says nothing else to the rest."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode() if key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if self._expected:
            allowed = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
        else:
            # a page from elsewhere may have its own name lead here
            allowed = is_loopback(_host(headers.get(b"host", b"")))
        problem = _NO_KEY if self._expected else _NOT_HERE
        await (self._app if allowed else refusal(problem))(scope, receive, send)


def _host(header: bytes) -> str:
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether it names this machine to itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

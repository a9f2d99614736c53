"""Authentication of API requests by the farm's key, on loopback too: other users run programs on this machine as well.

A client shows it as `Authorization: Bearer KEY`, as `X-API-Key: KEY`, or as the password in its URL, `http://farm:KEY@HOST`:
clients of other systems' protocols often have no other place for it.

`/healthz` needs no key, so that a load balancer can check that the process lives.
"""

from __future__ import annotations

import base64
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.endpoints import refusal
from farm.client.http_errors import ProblemDetails

HEALTH = "/healthz"
_HEADERS = (b"authorization", b"x-api-key")
_NO_KEY = ProblemDetails(
    401, "NotAllowed", "the API wants its key: set FARM_API_KEY or FARM_HOME, or send `Authorization: Bearer KEY`"
)


class KeyMiddleware:
    """Middleware that passes authenticated requests and refuses all others. `key` is never empty."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        if not key:
            raise ValueError("an API without a key would serve everybody")
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        shown = [value for name, value in scope["headers"] if name in _HEADERS]
        # of several, none is taken: a proxy may have checked another one
        allowed = len(shown) == 1 and hmac.compare_digest(_key_in(shown[0]), self._expected)
        is_health_check = not shown and scope["path"] == HEALTH
        await (self._app if allowed or is_health_check else refusal(_NO_KEY))(scope, receive, send)


def _key_in(value: bytes) -> bytes:
    """Return the key that a header shows; empty if it shows none."""
    scheme, has_scheme, rest = value.partition(b" ")
    if not has_scheme:
        return value
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(rest, validate=True).partition(b":")[2]
    except ValueError:
        return b""

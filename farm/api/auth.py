"""Authentication of API requests by the farm's key, on loopback too: other users run programs on this machine as well.

`/healthz` needs no key, so that a load balancer can check that the process lives.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.endpoints import refusal
from farm.client.http_errors import ProblemDetails

HEALTH = "/healthz"
_NO_KEY = ProblemDetails(
    401, "NotAllowed", "the API wants its key: set FARM_API_KEY or FARM_HOME, or send `Authorization: Bearer KEY`"
)


class KeyMiddleware:
    """Middleware that passes authenticated requests and refuses all others. `key` is never empty."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        if not key:
            raise ValueError("an API without a key would serve everybody")
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        # of several, none is taken: a proxy may have checked another one
        allowed = len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)
        is_health_check = not shown and scope["path"] == HEALTH
        await (self._app if allowed or is_health_check else refusal(_NO_KEY))(scope, receive, send)

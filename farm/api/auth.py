"""Authentication of API requests by the farm's key, on loopback too: other users run programs on this machine as well.

A client shows it as `Authorization: Bearer KEY`, as `X-API-Key: KEY`, or as the password in its URL, `http://farm:KEY@HOST`:
clients of other systems' protocols often have no other place for it.

`/healthz` needs no key, so that a load balancer can check that the process lives.
"""

from __future__ import annotations

import base64
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.endpoints import Refuse, refusal
from farm.client.http_errors import ProblemDetails

HEALTH = "/healthz"
_API_KEY = b"x-api-key"
_HEADERS = (b"authorization", _API_KEY)
_NO_KEY = ProblemDetails(
    401, "NotAllowed", "the API wants its key: set FARM_API_KEY or FARM_HOME, or send `Authorization: Bearer KEY`"
)


class KeyMiddleware:
    """Middleware that passes authenticated requests and refuses all others, by `refuse`.

    `key` is never empty; requests for `open_path` need none.
    """

    def __init__(self, app: ASGIApp, key: str, refuse: Refuse = refusal, open_path: str = "") -> None:
        if not key:
            raise ValueError("an API without a key would serve everybody")
        self._app = app
        self._expected = key.encode()
        self._refuse = refuse
        self._open_path = open_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = scope["headers"]
        shown = [value if name == _API_KEY else _key_in(value) for name, value in headers if name in _HEADERS]
        # of several, none is taken: a proxy may have checked another one
        allowed = len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)
        is_open = not shown and bool(self._open_path) and scope["path"] == self._open_path
        await (self._app if allowed or is_open else self._refuse(_NO_KEY, None))(scope, receive, send)


def _key_in(value: bytes) -> bytes:
    """Return the key in an Authorization header; empty if there is none."""
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(rest, validate=True).partition(b":")[2]
    except ValueError:
        return b""

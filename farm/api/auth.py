"""Authentication of API requests by a key, on loopback too: other users of the machine can reach it as well.

A client sends the key as `Authorization: Bearer KEY`, as `X-API-Key: KEY` or `X-Access-Token: KEY`, or as the password
in its URL, `http://farm:KEY@HOST`: clients of other systems' protocols often have no other place for it. A user name
without a password is no key.

The farm's own key always exists and has all rights. Named keys are rows of the store, which each API process reads
again every second while keys are used, so that a revoked key ends everywhere.

Only this module decides what a caller may do: a route is served only if a table gives it a scope.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from farm.api.endpoints import KEY_CHECK, Endpoints, NeededScope, Refuse, refusal
from farm.callers import ADMIN_NAME, ApiKey, Caller, acting_for, caller_of
from farm.client.http_errors import ProblemDetails, problem_of
from farm.errors import FarmError, Forbidden, NotAllowed
from farm.store.access import api_keys

_NO_KEY = ProblemDetails(
    401, "NotAllowed", "the API needs a key: set FARM_API_KEY or FARM_HOME, or send `Authorization: Bearer KEY`"
)
_FRESH_S = 1.0
"""Seconds for which the keys read from the store are trusted."""
_APART_S = 0.05
"""Seconds between two readings, however many unknown keys are sent."""
_ADMIN = Caller(ADMIN_NAME)

RouteScopes: TypeAlias = Mapping[tuple[str, str], NeededScope]
"""The requirements of routes, by method and path."""


class KnownKeys:
    """The valid keys of an API: the farm's own, which is never empty, and those in the store."""

    def __init__(self, endpoints: Endpoints, key: str) -> None:
        if not key:
            raise ValueError("an API without a key would serve anybody")
        self._endpoints = endpoints
        self._own = key.encode()
        self._known: Mapping[str, ApiKey] = {}
        self._read_at = self._requested_at = float("-inf")
        self._failure: FarmError | None = None
        self._reading = asyncio.Lock()
        self._rates: defaultdict[str, _Rate] = defaultdict(_Rate)

    async def caller(self, shown: bytes) -> tuple[Caller | None, float]:
        """Return the caller of a key, None if unknown, and the seconds until its rate allows the request."""
        if hmac.compare_digest(shown, self._own):
            return _ADMIN, 0.0
        key = await self._key(shown)
        if key is None:
            return None, 0.0
        wait_s = 0.0 if key.max_rate is None else self._rates[key.name].wait_s(key.max_rate)
        return caller_of(key), wait_s

    async def check(self, shown: bytes) -> None:
        """Raise NotAllowed if the key was revoked while its request waited."""
        if not hmac.compare_digest(shown, self._own) and await self._key(shown) is None:
            raise NotAllowed("the key was revoked")

    async def _key(self, shown: bytes) -> ApiKey | None:
        digest, now = api_keys.digest_of(shown), time.monotonic()
        if digest not in self._known or now - self._read_at > _FRESH_S:
            await self._read(now)
        return self._known.get(digest)

    async def _read(self, since: float) -> None:
        """Read the keys of the store, unless another request has begun to since: then its result is shared."""
        async with self._reading:
            if self._requested_at >= since:
                if self._failure is not None:
                    # else all waiting requests would query an unavailable store, one after the other
                    raise self._failure
                return
            await asyncio.sleep(self._requested_at + _APART_S - time.monotonic())
            self._requested_at = time.monotonic()
            try:
                self._known = await self._endpoints.run(self._endpoints.farm.store.read, api_keys.by_digest)
            except FarmError as error:
                self._failure = error
                raise
            self._read_at, self._failure = self._requested_at, None
            names = {key.name for key in self._known.values()}
            for name in [name for name in self._rates if name not in names]:
                del self._rates[name]


class _Rate:
    """The request rate of one key: one second's requests may come at once."""

    def __init__(self) -> None:
        self._left: float | None = None
        self._at = 0.0

    def wait_s(self, max_rate: float) -> float:
        """Count a request and return 0, or return the seconds until one is allowed."""
        now, most = time.monotonic(), max(1.0, max_rate)
        left = most if self._left is None else min(most, self._left + (now - self._at) * max_rate)
        self._at = now
        self._left = left - 1.0 if left >= 1.0 else left
        return 0.0 if left >= 1.0 else (1.0 - left) / max_rate


class KeyMiddleware:
    """Middleware that passes authenticated requests, with their callers, and refuses all others, by `refuse`.

    Requests for `open_paths` need no key.
    """

    def __init__(
        self, app: ASGIApp, keys: KnownKeys, refuse: Refuse = refusal, open_paths: Collection[str] = ()
    ) -> None:
        self._app = app
        self._keys = keys
        self._refuse = refuse
        self._open_paths = open_paths

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = scope["headers"]
        shown = [value for name, value in headers if name in (b"x-api-key", b"x-access-token")]
        shown += [key for name, value in headers if name == b"authorization" for key in _keys_in(value)]
        if not shown and scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        # with several keys the request is refused: a proxy may have checked a different one
        key = shown[0] if len(shown) == 1 else b""
        try:
            caller, wait_s = await self._keys.caller(key) if key else (None, 0.0)
        except FarmError as error:
            await self._refuse(problem_of(error), {"retry-after": "1"})(scope, receive, send)
            return
        if caller is None:
            await self._refuse(_NO_KEY, {"www-authenticate": "Bearer", "connection": "close"})(scope, receive, send)
        elif wait_s:
            fast = f"key {caller.name!r} sends more requests per second than its quota: wait {wait_s:.2f} s"
            retry_after = {"retry-after": str(max(1, round(wait_s)))}
            await self._refuse(ProblemDetails(429, "Overloaded", fast), retry_after)(scope, receive, send)
        else:
            KEY_CHECK.set(partial(self._keys.check, key))
            with acting_for(caller):
                await self._app({**scope, "farm.caller": caller, "farm.key": key}, receive, send)


def _keys_in(authorization: bytes) -> list[bytes]:
    """Return the key in the value of a header, empty if it is unreadable; no key for a user without a password."""
    scheme, _, rest = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return [rest]
    if scheme.lower() != b"basic":
        return [b""]
    try:
        user, _, password = base64.b64decode(rest, validate=True).partition(b":")
    except ValueError:
        return [b""]
    return [] if user and not password else [password]


def guarded(routes: Sequence[BaseRoute], scopes: RouteScopes, refuse: Refuse) -> list[BaseRoute]:
    """Return the routes, each refusing callers without its scope. Raises LookupError for one without an entry."""
    for route in routes:
        if not isinstance(route, Route) or not route.methods:
            raise LookupError(f"{route} is not a plain route with methods, so it cannot have a scope")
        by_method = {method: _scope_of(scopes, method, route.path) for method in route.methods}
        route.app = _Guard(route.app, by_method, refuse)
    return list(routes)


def _scope_of(scopes: RouteScopes, method: str, path: str) -> NeededScope:
    key = ("GET" if method == "HEAD" else method, path)
    if key not in scopes:
        raise LookupError(f"{key[0]} {path} has no scope: add it to the table of its routes")
    return scopes[key]


class _Guard:
    """A route that checks the scopes of its methods."""

    def __init__(self, app: ASGIApp, by_method: Mapping[str, NeededScope], refuse: Refuse) -> None:
        self._app = app
        self._by_method = by_method
        self._refuse = refuse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("farm.caller")
        # an unsupported method is refused by the route itself
        needed = self._by_method.get(scope["method"])
        app = self._app
        try:
            if needed is not None:
                if caller is None:
                    raise NotAllowed("the request has no key")
                caller.check(*(needed if isinstance(needed, tuple) else (needed,)))
        except (Forbidden, NotAllowed) as error:
            app = self._refuse(problem_of(error), None)
        await app(scope, receive, send)

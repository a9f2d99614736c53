"""The one place that decides what a caller may do: each route has a scope, by a table beside it, or is not served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from farm.api.endpoints import Refuse
from farm.callers import Caller, Scope
from farm.client.http_errors import problem_of
from farm.errors import Forbidden, NotAllowed

NeededScope: TypeAlias = Scope | tuple[Scope, ...] | None
"""The need of a route: a scope, one of several, or None for what is open to all."""
RouteScopes: TypeAlias = Mapping[tuple[str, str], NeededScope]
"""The needs of some routes, by method and path."""


def guarded(routes: Sequence[BaseRoute], scopes: RouteScopes, refuse: Refuse) -> list[BaseRoute]:
    """Return the routes, each refusing callers without its scope. Raises LookupError for one that has no scope."""
    for route in routes:
        if not isinstance(route, Route) or not route.methods:
            raise LookupError(f"{route} is no plain route with methods, so that no scope can be given to it")
        by_method = {method: _scope_of(scopes, method, route.path) for method in route.methods}
        route.app = _Guard(route.app, by_method, refuse)
    return list(routes)


def _scope_of(scopes: RouteScopes, method: str, path: str) -> NeededScope:
    place = ("GET" if method == "HEAD" else method, path)
    if place not in scopes:
        raise LookupError(f"{place[0]} {path} has no scope: say who may ask for it, in the table of its routes")
    return scopes[place]


class _Guard:
    """A route, behind the scopes that its methods need."""

    def __init__(self, app: ASGIApp, by_method: Mapping[str, NeededScope], refuse: Refuse) -> None:
        self._app = app
        self._by_method = by_method
        self._refuse = refuse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("farm.caller")
        # a method that the route has not is its own to refuse
        needed = self._by_method.get(scope["method"])
        app = self._app
        try:
            if needed is not None:
                if caller is None:
                    raise NotAllowed("the request showed no key")
                caller.check(*(needed if isinstance(needed, tuple) else (needed,)))
        except (Forbidden, NotAllowed) as error:
            app = self._refuse(problem_of(error), None)
        await app(scope, receive, send)

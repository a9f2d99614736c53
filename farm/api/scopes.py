"""The only place that decides what a caller may do: a route is served only if a table gives it a scope."""

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
"""The requirement of a route: a scope, one of several, or None for public ones."""
RouteScopes: TypeAlias = Mapping[tuple[str, str], NeededScope]
"""The requirements of routes, by method and path."""


def guarded(routes: Sequence[BaseRoute], scopes: RouteScopes, refuse: Refuse) -> list[BaseRoute]:
    """Return the routes, each refusing callers without its scope. Raises LookupError for one without an entry."""
    for route in routes:
        if not isinstance(route, Route) or not route.methods:
            raise LookupError(f"{route} is not a plain route with methods, so it cannot have a scope")
        by_method = {method: _scope_of(scopes, method, route.path) for method in route.methods}
        route.app = _Guard(route.app, by_method, refuse)
    return list(routes)


def _scope_of(scopes: RouteScopes, method: str, path: str) -> NeededScope:
    place = ("GET" if method == "HEAD" else method, path)
    if place not in scopes:
        raise LookupError(f"{place[0]} {path} has no scope: add it to the table of its routes")
    return scopes[place]


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

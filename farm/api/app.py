"""The API as a web application: all its routes, and what is answered where there is none."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from farm.api import batches, engines, rollouts
from farm.api.desk import Desk, refusal
from farm.api.guard import Guard
from farm.problems import Problem


def application(desk: Desk, key: str = "") -> ASGIApp:
    """What answers at a desk, to those who have the key; without one, to those on this machine."""
    inner = Starlette(
        routes=[
            desk.health("/healthz"),
            *batches.routes(desk),
            *rollouts.routes(desk),
            *engines.routes(desk),
            desk.get("/v1/nodes", lambda asked: desk.service.nodes()),
        ],
        exception_handlers={404: _not_there, 405: _not_so},
    )
    inner.router.redirect_slashes = False
    return Guard(inner, key)


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(Problem(404, "NotFound", f"there is no {ascii(request.url.path)[1:-1][:200]}"))


async def _not_so(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = Problem(405, "NotAllowed", f"not by {ascii(request.method)[1:-1][:20]}")
    return refusal(problem, headers=error.headers)

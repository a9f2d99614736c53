"""The web application of the page: its routes, orders given on the page, and its error pages.

It reads the store in the API's process, and shows nothing to a browser that has not signed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from starlette.types import Scope as AsgiScope

from farm.api.auth import KnownKeys
from farm.api.endpoints import Endpoints
from farm.api.schemas import RequestRejected
from farm.callers import Scope, current_caller
from farm.client.http_errors import problem_of
from farm.client.local import LocalFarm
from farm.errors import InvalidRequest, NotFound
from farm.web.batch_views import BatchViews
from farm.web.cluster_views import ClusterViews
from farm.web.exports import Exports
from farm.web.rendering import HEADERS, ROOT, html
from farm.web.rollout_views import RolloutViews
from farm.web.sign_in import SignedIn, read_form, signed_in, signed_out

Order = Callable[[LocalFarm, str], object]
_SUBMITTERS, _OPERATORS = (Scope.SUBMIT, Scope.OPERATE), (Scope.OPERATE,)
_ORDERS: Mapping[str, tuple[tuple[Scope, ...], Order]] = {
    "cancel": (_SUBMITTERS, lambda farm, id: farm.cancel(id)),
    "rescore": (_SUBMITTERS, lambda farm, id: farm.rescore(id)),
    "drain-node": (_OPERATORS, lambda farm, id: farm.drain_node(id)),
    "drain-engine": (_OPERATORS, lambda farm, id: farm.drain_engine(id)),
    "pause-engine": (_OPERATORS, lambda farm, id: farm.orders.order_pause("drain", _who(), [id])),
    "resume-engine": (_OPERATORS, lambda farm, id: farm.orders.order_pause("", _who(), [id])),
}
"""The orders, each with the scopes of which a key needs one."""

View = Callable[[Request], Awaitable[Response]]


class Orders:
    """Executes orders, and redirects to the page they were given on."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def carry_out(self, request: Request) -> Response:
        """Execute one order, named in the path, for the `id` in the form."""
        name = request.path_params["name"]
        if name not in _ORDERS:
            raise NotFound(f"there is no order {name!r}: use one of {', '.join(_ORDERS)}")
        scopes, order = _ORDERS[name]
        current_caller().check(*scopes)
        form = await read_form(request)
        id = form.get("id", "")
        if not id:
            raise InvalidRequest("the form must name the target of the order", field="id")
        await self._endpoints.run(order, self._endpoints.farm, id)
        back = form.get("back", "/")
        if not back.startswith("/") or back.startswith(("//", "/\\")) or not back.isprintable():
            back = "/"
        return RedirectResponse(ROOT + back, 303, HEADERS)


def _who() -> str:
    return f"{current_caller().name} on the page"


_STATIC = Path(__file__).parent / "static"


def application(endpoints: Endpoints, keys: KnownKeys, visitor_key: str = "", records_history: bool = False) -> ASGIApp:
    """Return the page's ASGI application, served below `farm.web.rendering.ROOT`, with that prefix removed from paths.

    With a `visitor_key` there is no sign-in: every browser has that key's rights. With `records_history`, the history
    of nodes and engines begins now, else at the first request for it.
    """
    batches, rollouts = BatchViews(endpoints), RolloutViews(endpoints)
    cluster, exports, orders = ClusterViews(endpoints, records_history), Exports(endpoints), Orders(endpoints)

    async def sign_in(request: Request) -> Response:
        if request.method == "POST":
            return await signed_in(request, keys)
        return html("sign_in.html", then=request.query_params.get("then", "/"), wrong=False)

    async def sign_out(request: Request) -> Response:
        return signed_out()

    routes = [
        _get("/", batches.newest),
        _get("/batches/{id}", batches.batch),
        _get("/batches/{id}/live", batches.live),
        _get("/batches/{id}/rollouts", batches.rollouts),
        _get("/batches/{id}/rollouts.jsonl", exports.lines),
        _get("/batches/{id}/rollouts.parquet", exports.parquet),
        _get("/batches/{id}/failures", batches.failures),
        _get("/batches/{id}/figures", batches.figures),
        _get("/batches/{id}/selection", batches.selection),
        _get("/groups/{id}", rollouts.group),
        _get("/rollouts/{id}", rollouts.transcript),
        _get("/rollouts/{id}/terminal", rollouts.terminal),
        _get("/rollouts/{id}/tokens", rollouts.tokens),
        _get("/rollouts/{id}/timeline", rollouts.timeline),
        _get("/rollouts/{id}/trace.json", exports.trace),
        _get("/rollouts/{id}/page.html", exports.static_page),
        _get("/rollouts/{id}/artefact", exports.artefact),
        _get("/cluster", cluster.nodes_and_engines),
        _get("/cluster/live", cluster.live),
        _get("/cluster/history.json", cluster.history),
        _get("/alarms", cluster.alarms),
        _get("/find", rollouts.find),
        Route("/orders/{name}", _answered(orders.carry_out), methods=["POST"]),
        Route("/sign-in", _answered(sign_in), methods=["GET", "POST"]),
        Route("/sign-out", _answered(sign_out), methods=["POST"]),
        Mount("/static", app=_StaticFiles(directory=_STATIC)),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: _no_page, 405: _no_page})
    inner.router.redirect_slashes = False
    return SignedIn(inner, keys, visitor_key)


def _get(path: str, view: View) -> Route:
    return Route(path, _answered(view), methods=["GET"])


def _answered(view: View) -> View:
    """Return the view with error pages instead of exceptions."""

    async def answer(request: Request) -> Response:
        try:
            return await view(request)
        except HTTPException:
            raise
        except ClientDisconnect:
            # the client is gone, so nobody reads an answer
            return Response(status_code=499)
        except Exception as error:
            problem = error.problem if isinstance(error, RequestRejected) else problem_of(error)
            text = f"{problem.field}: {problem.message}" if problem.field else problem.message
            return html("message.html", problem.status, title=problem.kind, text=text)

    return answer


async def _no_page(request: Request, error: Exception) -> Response:
    return html("message.html", 404, title="There is no such page", text="")


class _StaticFiles(StaticFiles):
    """Files of the package, which a browser may cache for an hour."""

    async def get_response(self, path: str, scope: AsgiScope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update({**HEADERS, "cache-control": "max-age=3600"})
        return response

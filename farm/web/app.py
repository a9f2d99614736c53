"""The web application of the page: its routes, orders given on the page, and its error pages.

It reads the store in the API's process, and shows nothing to a browser that has not signed in. A browser sends a key of
the API in a cookie that scripts cannot read and other sites cannot send. Any API process knows the keys, so a session
is not bound to one of them. A request that changes something must come from a page of the farm.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from farm.api.auth import KnownKeys
from farm.api.endpoints import KEY_CHECK, Endpoints
from farm.api.schemas import RequestRejected
from farm.callers import Scope, acting_for, current_caller
from farm.client.http_errors import problem_of
from farm.client.local import LocalFarm
from farm.errors import FarmError, InvalidRequest, NotFound
from farm.web.batch_views import BatchViews
from farm.web.cluster_views import ClusterViews
from farm.web.exports import Exports
from farm.web.rendering import HEADERS, ROOT, html
from farm.web.rollout_views import RolloutViews

COOKIE = "farm_key"
_MAX_FORM_BYTES = 4096

Order = Callable[[LocalFarm, str], object]
View = Callable[[Request], Awaitable[Response]]


class SignedIn:
    """Middleware that passes requests of signed-in users, and shows the sign-in form for all others.

    With a `visitor_key` every request has that key's rights: cookies are ignored, and the form is not shown.
    """

    def __init__(self, app: ASGIApp, keys: KnownKeys, visitor_key: str = "") -> None:
        self._app = app
        self._keys = keys
        self._visitor_key = visitor_key

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        if scope["method"] not in {"GET", "HEAD"} and not _is_own(headers):
            await html("message.html", 403, title="Not from here", text="orders must come from a page of the farm")(
                scope, receive, send
            )
            return
        if self._visitor_key and path in ("/sign-in", "/sign-out"):
            # a cookie of this address may belong to a farm on another port
            await RedirectResponse(f"{ROOT}/", 303, HEADERS)(scope, receive, send)
            return
        if path.startswith(("/static/", "/sign-in")):
            await self._app(scope, receive, send)
            return
        key = (self._visitor_key or _shown(headers)).encode()
        try:
            caller, wait_s = await self._keys.caller(key) if key else (None, 0.0)
        except FarmError as error:
            problem = problem_of(error)
            await html("message.html", problem.status, title=problem.kind, text=problem.message)(scope, receive, send)
            return
        if caller is not None and wait_s:
            text = f"key {caller.name!r} sends more requests per second than its quota: wait {wait_s:.2f} s"
            await html("message.html", 429, title="Too fast", text=text)(scope, receive, send)
            return
        if caller is not None:
            KEY_CHECK.set(partial(self._keys.check, key))
            with acting_for(caller):
                await self._app({**scope, "farm.caller": caller}, receive, send)
            return
        wanted = path + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        if headers.get("hx-request") or "text/html" not in headers.get("accept", "text/html"):
            await Response("sign in first", 401, {**HEADERS, "hx-redirect": f"{ROOT}/sign-in"})(scope, receive, send)
            return
        await RedirectResponse(f"{ROOT}/sign-in?then={quote(wanted, safe='')}", 303, HEADERS)(scope, receive, send)


async def signed_in(request: Request, keys: KnownKeys) -> Response:
    """Answer the form: redirect to the requested page, with the cookie, or show the form again. Raises FarmError."""
    form = await read_form(request)
    then = form.get("then", "/")
    key = form.get("key", "").strip()
    if not key or (await keys.caller(key.encode()))[0] is None:
        return html("sign_in.html", 401, then=then, wrong=True)
    response = RedirectResponse(ROOT + (then if _is_own_page(then) else "/"), 303, HEADERS)
    is_secure = request.url.scheme == "https"
    response.set_cookie(
        COOKIE,
        quote(key, safe=""),
        max_age=30 * 86_400,
        path=ROOT,
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )
    return response


def signed_out() -> Response:
    """Return the response that ends a session in the browser."""
    response = RedirectResponse(f"{ROOT}/sign-in", 303, HEADERS)
    response.delete_cookie(COOKIE, path=ROOT)
    return response


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, of a repeated field the last. A form that is too large has none."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_FORM_BYTES:
            return {}
    fields = parse_qs(data.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=50)
    return {name: values[-1] for name, values in fields.items()}


def _is_own_page(path: str) -> bool:
    """Return whether a path leads to a page of the farm, not to another site."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _is_own(headers: Headers) -> bool:
    """Return whether a request comes from a page of the same address, by one of the headers that browsers send."""
    if site := headers.get("sec-fetch-site"):
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host", "")


def _shown(headers: Headers) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return unquote(cookie.value) if cookie is not None else ""


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
        Mount("/static", app=_StaticFiles(directory=Path(__file__).parent / "static")),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: _no_page, 405: _no_page})
    inner.router.redirect_slashes = False
    return SignedIn(inner, keys, visitor_key)


def _get(path: str, view: View) -> Route:
    return Route(path, _answered(view), methods=["GET"])


def _answered(view: View) -> View:

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

"""Sign-in: a browser sends a key of the API in a cookie that scripts cannot read and other sites cannot send.

Any API process knows the keys, so a session is not bound to one of them. A request that changes something must come
from a page of the farm.
"""

from __future__ import annotations

from functools import partial
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, unquote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.auth import KnownKeys
from farm.api.endpoints import KEY_CHECK
from farm.callers import acting_for
from farm.client.http_errors import problem_of
from farm.errors import FarmError
from farm.web.rendering import HEADERS, ROOT, html

COOKIE = "farm_key"
_OPEN = ("/static/", "/sign-in")
_SESSIONS = ("/sign-in", "/sign-out")
_DAYS = 30
_MAX_FORM_BYTES = 4096
_SAFE = {"GET", "HEAD"}


class SignedIn:
    """Middleware that passes requests of signed-in users, and shows the sign-in form for all others.

    With a `visitor_key` every request has that key's rights: cookies are ignored, and the form is not shown.
    """

    def __init__(self, app: ASGIApp, keys: KnownKeys, visitor_key: str = "") -> None:
        self._app = app
        self._keys = keys
        self._visitor_key = visitor_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        if scope["method"] not in _SAFE and not _is_own(headers):
            await html("message.html", 403, title="Not from here", text="only pages of the farm give orders")(
                scope, receive, send
            )
            return
        if self._visitor_key and path in _SESSIONS:
            # a cookie of this address may belong to a farm on another port
            await RedirectResponse(f"{ROOT}/", 303, HEADERS)(scope, receive, send)
            return
        if path.startswith(_OPEN):
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
    response = RedirectResponse(ROOT + (then if _is_place(then) else "/"), 303, HEADERS)
    is_secure = request.url.scheme == "https"
    response.set_cookie(
        COOKIE,
        quote(key, safe=""),
        max_age=_DAYS * 86_400,
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


def _is_place(path: str) -> bool:
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

"""Endpoints made of functions: each runs in a thread, as it may have to wait for the database.

Lists are answered in pages of a bounded size; the last item of a page is the cursor of the next.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import re
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote, urlencode

from sqlalchemy import text
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from farm import metrics
from farm.api.schemas import ApiRequest, RequestRejected, read_request
from farm.callers import Scope
from farm.client import serialization
from farm.client.http_errors import ProblemDetails, problem_of
from farm.client.local import LocalFarm
from farm.client.sandboxes.node_line import NodeLine
from farm.errors import BrokerUnavailable, FarmUnreachable, ServiceError, StoreUnavailable
from farm.notifications import ENDED, Signals
from farm.records.lending.borrowed_sandbox import BorrowedSandbox
from farm.records.request_values import Request as RequestModel
from farm.settings import Settings

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two queries of a waiting request without a notification."""

Answer = Callable[[ApiRequest], Any]
NeededScope: TypeAlias = Scope | tuple[Scope, ...] | None
"""The requirement of a route: a scope, one of several, or None for public ones."""
JSON, TEXT, BYTES, EVENTS = "application/json", "text/plain", "application/octet-stream", "text/event-stream"
N_THREADS = 12
"""Almost the number of a store's connections."""
_HEALTH_S = (1.0, 5.0)
"""Seconds for which a health check retries an unavailable database, and its total time limit."""
Examine = Callable[[], Sequence[Any]]
"""A function that checks the farm; its results are those of `farm doctor`."""
Refuse = Callable[[ProblemDetails, Mapping[str, str] | None], Response]
"""A function that converts a problem to a protocol's own error response, with further headers."""


class BatchWaiters:
    """The waiting requests of one process. Notifications only save time: each request also polls."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._asking: set[asyncio.Future[Any]] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    async def wait_until(
        self,
        batch_id: str,
        ask: Callable[[], Coroutine[Any, Any, T]],
        settled: Callable[[T], bool],
        wait_s: float,
        poll_s: float = POLL_S,
    ) -> T:
        """Return the result once it is `settled`, or the last one when the time is over or this process ends."""
        self._listen()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        hint = asyncio.Event()
        self._waiting[batch_id].add(hint)
        try:
            answer = await ask()
            while not (settled(answer) or self._closed.is_set()) and (left_s := deadline - loop.time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(poll_s, left_s)):
                        await hint.wait()
                hint.clear()
                # hundreds of further queries would delay the end of the process
                answer = await self._unless_closed(ask(), answer)
            return answer
        finally:
            self._waiting[batch_id].discard(hint)
            if not self._waiting[batch_id]:
                del self._waiting[batch_id]

    async def _unless_closed(self, asking: Coroutine[Any, Any, T], before: T) -> T:
        """Return the result of a query, or the previous one if this process ends during it."""
        if self._closed.is_set():
            asking.close()
            return before
        task = asyncio.ensure_future(asking)
        self._asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
            return before
        finally:
            self._asking.discard(task)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Answer all waiting requests now."""
        self._closed.set()
        if n := sum(map(len, self._waiting.values())):
            log.warning("Shutdown: %d waiting requests are answered early; their clients repeat them", n)
        for batch_id in list(self._waiting):
            self._wake(batch_id)
        for task in list(self._asking):
            task.cancel()

    def _listen(self) -> None:
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._hear, args=(loop,), name="hints", daemon=True)
            self._thread.start()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = self._signals.listen(ENDED)
        try:
            while not self._closed.is_set():
                for batch_id in dict.fromkeys(listener.wait(POLL_S)):
                    loop.call_soon_threadsafe(self._wake, batch_id)
        except RuntimeError:
            # the event loop ended before this thread
            if not loop.is_closed():
                raise
        finally:
            listener.close()

    def _wake(self, batch_id: str) -> None:
        for hint in self._waiting.get(batch_id, ()):
            hint.set()


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """A page of a list. `next_query` is the query for the next one; None after the last."""

    items: Sequence[T]
    next_query: Mapping[str, str] | None

    def headers(self, request: Request) -> dict[str, str]:
        """Return the header with the link to the next page, if there may be one."""
        if self.next_query is None:
            return {}
        query = urlencode({**request.query_params, **self.next_query})
        return {"link": f'<{quote(request.url.path)}?{query}>; rel="next"'}


def list_page(items: Sequence[T], limit: int, name: str, key: Callable[[T], object]) -> ListPage[T]:
    """Return a page of up to `limit`; a full page has a next one, with its last item's key as the cursor."""
    full = len(items) >= limit
    return ListPage(items, {name: str(key(items[-1])), "limit": str(limit)} if full else None)


def page_after(items: Sequence[T], limit: int, last: str | None, key: Callable[[T], str]) -> ListPage[T]:
    """Return a page of a list in memory: the items with a key greater than `last`, in order of the key."""
    later = sorted((item for item in items if last is None or key(item) > last), key=key)[:limit]
    return list_page(later, limit, "after", key)


@dataclass(frozen=True, slots=True)
class LongPoll(Generic[T]):
    """A query that is repeated until its result is settled or `wait_s` are over; it occupies no thread in between."""

    batch_id: str
    ask: Callable[[], T]
    settled: Callable[[T], bool]
    wait_s: float
    poll_s: float = POLL_S
    """Seconds between two queries without a notification."""
    is_given_up: Callable[[], Awaitable[bool]] | None = None
    """Tells whether nobody waits for the result any more; then ClientDisconnect is raised."""


def no_findings() -> Sequence[Any]:
    """Return no findings."""
    return ()


async def _no_key() -> None:
    """Check nothing: the request has no key."""


KEY_CHECK: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("key_check", default=_no_key)
"""Raises NotAllowed once the key of the request is revoked; long waits call it repeatedly."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The settings of `farm.settings` that the API depends on.

    With `strict_compat`, other systems' protocols answer as those systems do even where that is their bug.
    """

    node_timeout_s: float
    max_sandboxes: int
    prorl_timeout_s: float
    verl_tool_wait_s: float
    verl_tool_lease_s: float
    verl_tool_action_s: float
    strict_compat: bool = False

    @classmethod
    def of(cls, settings: Settings, strict_compat: bool = False) -> ApiConfig:
        return cls(
            settings.node_timeout_s,
            settings.max_sandboxes,
            settings.prorl_timeout_s,
            settings.verl_tool_wait_s,
            settings.verl_tool_lease_s,
            settings.verl_tool_action_s,
            strict_compat,
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint: its purpose, scope, function, and the types of the function's arguments by name, and of its answer.

    `body` is a model of the request's body. Without a scope it needs no key.
    """

    summary: str
    scope: NeededScope
    answer: Callable[..., Any]
    types: Mapping[str, Any]
    returns: Any
    body: type[RequestModel] | None
    media_type: str

    @property
    def query(self) -> type[RequestModel] | None:
        return self.types.get("query")

    def arguments(self, endpoints: Endpoints, request: ApiRequest) -> Mapping[str, Any]:
        """Return the arguments of the function. Raises InvalidRequest naming the field of the query or the body."""
        values = {"endpoints": endpoints, "farm": endpoints.farm, "request": request, **request.path}
        if self.query is not None:
            values["query"] = request.parse_query(self.query)
        if self.body is not None and "body" in self.types:
            values["body"] = request.parse_body(self.body)
        return {name: values[name] for name in self.types}


class EndpointTable(dict[tuple[str, str], Endpoint]):
    """Endpoints by method and path. Each is declared once, by the function that answers it.

    The function is called with arguments by name: `endpoints`, their `farm`, the `request`, those of the path, and the
    validated `query` and `body`, whose models are their annotations. A coroutine function runs on the event loop, and
    uses `Endpoints.run` for everything that waits for the database; others run in a thread.
    """

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        scope: NeededScope,
        *,
        body: type[RequestModel] | None = None,
        returns: Any = None,
        media_type: str = JSON,
    ) -> Callable[[F], F]:
        """Return a decorator that declares the endpoint of a function.

        `body` is the model of a body that the function reads by itself, or that is only known at run time; `returns` is
        the type of the answer in the Response that the function returns. Raises TypeError for an unknown argument.
        """

        def declare(answer: F) -> F:
            types = get_type_hints(answer)
            answer_type = types.pop("return")
            known = {"endpoints", "farm", "request", "query", "body", *re.findall(r"{(\w+)}", path)}
            if unknown := types.keys() - known:
                raise TypeError(f"{method} {path} has no {', '.join(sorted(unknown))}")
            if get_origin(answer_type) in (ListPage, Sequence):
                answer_type = list[get_args(answer_type)]  # type: ignore[misc]
            model = body or types.get("body")
            self[method, path] = Endpoint(summary, scope, answer, types, returns or answer_type, model, media_type)
            return answer

        return declare


class Endpoints:
    """Endpoints that answer requests from the store of a farm; `refuse` makes their error responses."""

    def __init__(self, farm: LocalFarm, config: ApiConfig, examine: Examine = no_findings) -> None:
        self.farm = farm
        self.config = config
        self.examine = examine
        self.refuse: Refuse = refusal
        self.nodes = NodeLine(lambda reference: self.run(farm.sandboxes.address, reference))
        """The connection to borrowed sandboxes."""
        self.metrics = metrics.registry(farm.store, config.node_timeout_s)
        self.n_streams = 0
        """The open streams of events."""
        self._hints = BatchWaiters(farm.signals)
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="answer")
        # a health check must not wait behind requests that wait for the database
        self._health = ThreadPoolExecutor(1, thread_name_prefix="health")

    def refusing(self, refuse: Refuse) -> Endpoints:
        """Return the same endpoints, with the same threads and another protocol's error responses."""
        other = copy.copy(self)
        other.refuse = refuse
        return other

    def route(
        self, method: str, path: str, answer: Callable[[ApiRequest], Awaitable[Any]], takes_body: bool = True
    ) -> Route:
        """Return the route of a coroutine, which uses `run` for everything that waits for the database.

        A POST without a body need not declare JSON; if it has a body, that is not read.
        """
        return Route(path, self._endpoint(answer, takes_body), methods=[method])

    def get(self, path: str, answer: Answer) -> Route:
        """Return the route of a GET request, which changes nothing."""
        return self.route("GET", path, lambda request: self.run(answer, request))

    def post(self, path: str, answer: Answer, takes_body: bool = True) -> Route:
        """Return the route of a POST request, which makes changes."""
        return self.route("POST", path, lambda request: self.run(answer, request), takes_body)

    def routes(self, table: EndpointTable) -> list[Route]:
        """Return the routes of declared endpoints."""
        return [self._route_of(method, path, endpoint) for (method, path), endpoint in table.items()]

    def _route_of(self, method: str, path: str, endpoint: Endpoint) -> Route:
        def answer(request: ApiRequest) -> Any:
            return endpoint.answer(**endpoint.arguments(self, request))

        is_coroutine = inspect.iscoroutinefunction(endpoint.answer)
        return self.route(method, path, answer if is_coroutine else partial(self.run, answer))

    def health(self, path: str, status: Callable[[], Any] = lambda: {"status": "ok"}) -> Route:
        """Return the route of a health check, which fails if the database or the broker does not answer.

        `status` returns its answer otherwise, without blocking.
        """

        async def answer(request: ApiRequest) -> Any:
            await self.check_health()
            return status()

        return self.route("GET", path, answer)

    async def check_health(self) -> None:
        """Raise StoreUnavailable or BrokerUnavailable if the database or the broker does not answer."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HEALTH_S[1]):
                await loop.run_in_executor(self._health, self._ask_store)
        except TimeoutError:
            raise StoreUnavailable("the database does not answer") from None
        try:
            async with asyncio.timeout(_HEALTH_S[1]):
                await loop.run_in_executor(self._health, self.farm.signals.check)
        except TimeoutError:
            raise BrokerUnavailable("the broker does not answer") from None

    async def wait_until(self, wanted: LongPoll[T]) -> T:
        """Return the result of a query once it is settled, or the last one when its time is over."""

        async def ask() -> T:
            if wanted.is_given_up is not None and await wanted.is_given_up():
                raise ClientDisconnect
            await KEY_CHECK.get()()
            return await self.run(wanted.ask)

        return await self._hints.wait_until(wanted.batch_id, ask, wanted.settled, wanted.wait_s, wanted.poll_s)

    async def await_sandbox(self, state: BorrowedSandbox, wait_s: float, poll_s: float = POLL_S) -> BorrowedSandbox:
        """Return the state of a borrowed sandbox once it runs or has ended, or the last one after `wait_s`."""
        ask = partial(self.farm.sandboxes.get, state.sandbox_id)
        return await self.wait_until(LongPoll(state.sandbox_id, ask, lambda now: not now.pending, wait_s, poll_s))

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that is run in a thread, for the caller of the request."""
        in_context = partial(copy_context().run, call, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_context)

    @property
    def is_closed(self) -> bool:
        return self._hints.is_closed

    def close(self) -> None:
        """Answer all long polls; later ones are answered without waiting."""
        self._hints.close()

    def _ask_store(self) -> None:
        self.farm.store.read(lambda connection: connection.execute(text("SELECT 1")).scalar_one(), _HEALTH_S[0])

    def _endpoint(
        self, answer: Callable[[ApiRequest], Awaitable[Any]], takes_body: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                value = await answer(await read_request(request, takes_body))
                if isinstance(value, Response):
                    return value
                headers = value.headers(request) if isinstance(value, ListPage) else None
                items = value.items if isinstance(value, ListPage) else value
                return Response(await self.run(serialization.written, items), 200, headers, "application/json")
            except RequestRejected as refused:
                # the rest of the request is not read
                return self.refuse(refused.problem, {"connection": "close"})
            except ClientDisconnect:
                # the client is gone, so nobody reads an answer
                return Response(status_code=499)
            except asyncio.CancelledError:
                if not self.is_closed:
                    raise
                ends = "this API process ends and may have executed the request: send it again"
                return self.refuse(problem_of(FarmUnreachable(ends)), {"retry-after": "1"})
            except Exception as error:
                retry_after = {"retry-after": "1"} if isinstance(error, ServiceError) else None
                return self.refuse(problem_of(error), retry_after)

        return endpoint


def refusal(problem: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response for a problem."""
    return Response(problem.body(), problem.status, headers, "application/json")


def allowed_methods(request: Request) -> dict[str, str]:
    """Return the header that names the methods of all routes of an address; empty for an unknown address."""
    methods = {
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return {"allow": ", ".join(sorted(methods))} if methods else {}

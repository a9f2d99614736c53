"""Requests of the API and their validation: bodies, queries and endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest

from farm.client import serialization
from farm.client.consumer_stream import CONSUMER, CONSUMER_NAME, MAX_WAIT_S
from farm.client.http_errors import ProblemDetails
from farm.client.request_checks import checked
from farm.client.weight_update import MODES
from farm.errors import InvalidRequest
from farm.records.lending.sandbox_calls import AS_BASE64
from farm.records.request_values import Name, Request
from farm.records.training_run import RUN_NAME

T = TypeVar("T", bound=Request)

Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]
Cursor = Annotated[int, Field(ge=0, le=2**31 - 1)]
# The description documents the form of values that are checked elsewhere, where the error has a remedy.
Url = Annotated[
    Name,
    Field(max_length=500, json_schema_extra={"pattern": r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,4})?(/[A-Za-z0-9._-]+)*$"}),
]
RunName = Annotated[Name, Field(json_schema_extra={"pattern": RUN_NAME})]
ConsumerName = Annotated[str, Field(json_schema_extra={"pattern": CONSUMER_NAME})]


class RequestRejected(Exception):
    """A refusal with an HTTP status of its own."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One complete request: the names in its path, its query, its headers, its raw body.

    `query_lists` has all values of repeated query fields; `is_disconnected` tells whether its client has left.
    `pieces` yields the body of a request whose route takes none. `key` is the key of the request.
    """

    path: Mapping[str, str]
    query: Mapping[str, str]
    data: bytes
    query_lists: Mapping[str, list[str]]
    is_disconnected: Callable[[], Awaitable[bool]]
    headers: Mapping[str, str]
    pieces: Callable[[], AsyncIterator[bytes]]
    key: str = ""

    def parse_query(self, kind: type[T]) -> T:
        """Return its validated query. Raises InvalidRequest naming the field."""
        return checked(kind, dict(self.query))

    def parse_body(self, kind: type[T]) -> T:
        """Return its validated body. Raises InvalidRequest naming the field."""
        return checked(kind, self.body)

    @property
    def body(self) -> Any:
        """Raises InvalidRequest."""
        try:
            return serialization.parsed(self.data)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"is not UTF-8, at byte {error.start}", field="body") from None
        except ValueError as error:
            raise InvalidRequest(f"is not JSON: {error}", field="body") from None


async def read_request(request: HttpRequest, takes_body: bool = True) -> ApiRequest:
    """Read a request. Raises RequestRejected for a body that is too large, or not declared as JSON."""
    data = await _body(request) if takes_body else b""
    query = request.query_params
    lists = {name: query.getlist(name) for name in query}
    return ApiRequest(
        path=request.path_params,
        query=dict(query),
        data=data,
        query_lists=lists,
        is_disconnected=request.is_disconnected,
        headers=request.headers,
        pieces=request.stream,
        key=request.scope.get("farm.key", b"").decode("latin-1"),
    )


async def _body(request: HttpRequest) -> bytes:
    if request.method not in ("POST", "PATCH"):
        return b""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # web pages may send other types without a CORS preflight
        raise RequestRejected(ProblemDetails(415, "InvalidRequest", "must be of content-type application/json", "body"))
    n_bytes = request.headers.get("content-length", "0")
    data = bytearray()
    if int(n_bytes) <= serialization.MAX_BODY_BYTES:
        async for piece in request.stream():
            data += piece
            if len(data) > serialization.MAX_BODY_BYTES:
                break
        else:
            return bytes(data)
    raise RequestRejected(ProblemDetails(413, "InvalidRequest", serialization.TOO_LARGE, "body"))


Limit = Annotated[int, Field(ge=1, le=1000)]


class RecentQuery(Request):
    """The newest, or the newest before one: the last of the previous page."""

    limit: Limit = 20
    before: Name | None = None


class AfterQuery(Request):
    """The first of a list, or those after one: the last of the previous page."""

    limit: Limit = 1000
    after: Name | None = None


class CallsQuery(Request):
    """The first calls, or those after the call of that number."""

    limit: Annotated[int, Field(ge=1, le=256)] = 256
    after: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class EndedQuery(Request):
    """`limit` counts rollouts, or complete `groups`."""

    cursor: Cursor = 0
    groups: bool = False
    limit: Annotated[int, Field(ge=1, le=256)] = 64
    wait_s: Wait = 0.0


class EventQuery(Request):
    """Begins after `cursor`, or at the cursor of `consumer`."""

    groups: bool = False
    consumer: ConsumerName = CONSUMER
    cursor: Cursor | None = None


class OpenQuery(Request):
    wait_s: Wait = 0.0


class ConsumerQuery(Request):
    consumer: ConsumerName = CONSUMER


class Acknowledgement(ConsumerQuery):
    cursor: Cursor


class RolloutSelection(Request):
    """A batch, a group or a rollout, or some rollouts of it."""

    id: str
    rollout_ids: list[str] | None = None


class BatchKeys(Request):
    keys: Annotated[list[Name], Field(max_length=1000)]


class GroupIds(Request):
    group_ids: Annotated[list[Name], Field(max_length=1000)]


class SandboxesQuery(Request):
    """The newest borrowed sandboxes, including those that have `ended` if set; or the newest before one, by its id."""

    limit: Limit = 100
    ended: bool = False
    before: Name | None = None


class CallQuery(Request):
    """`call_id` is the same for repeats of the same call."""

    call_id: Annotated[Name, Field(max_length=200)] = ""


class NoOrder(Request):
    """A request without content."""


class StepQuery(Request):
    """The newest step of a training run, up to a given one."""

    run: RunName
    up_to: int | None = None


class StepRecord(Request):
    """The record of a step of a training run."""

    run: RunName
    step: Annotated[int, Field(ge=0, le=2**31 - 1)]
    record: dict[str, Any]


class RatesQuery(Request):
    """Some instances of a data source, or all of a training run."""

    run: RunName
    data_source: Name
    instance_ids: list[Name] | None = None
    min_version: int | None = None
    solved_at: float = 1.0


class ArchivePart(Request):
    """A part of a task archive: its number from 0, and its bytes in base64."""

    number: Annotated[int, Field(ge=0, le=100_000)]
    data: Annotated[str, Field(max_length=6_000_000, json_schema_extra=AS_BASE64)]


class ArchiveEnd(Request):
    n_parts: Annotated[int, Field(ge=1, le=100_000)]


class ArtefactQuery(Request):
    name: str


class OneNode(Request):
    node: Annotated[Name, Field(max_length=128)]


class OneEngine(Request):
    url: Url


class ClearOrder(Request):
    """A request without a body forgets nothing."""

    forget_weights: bool = False


class NewEngine(OneEngine):
    model: Annotated[Name, Field(max_length=200)] = ""
    key: Annotated[str, Field(json_schema_extra={"pattern": "^[!-~]{0,500}$"})] = "none"
    tokenizer: Annotated[Name, Field(max_length=500)] = ""
    tool_format: Annotated[Name, Field(max_length=32)] = ""


class SomeEngines(Request):
    """These engines, or all of them."""

    urls: list[Url] | None = None


class PauseOrder(SomeEngines):
    """`mode` is "" to resume, `by` is who wants it, `held` tells that it sends heartbeats until it resumes them."""

    mode: Annotated[str, Field(json_schema_extra={"enum": ["", *MODES]})]
    by: Annotated[Name, Field(max_length=200)] = "over HTTP"
    held: bool = False


class HoldOrder(SomeEngines):
    """`by` is who gave the order to pause."""

    by: Annotated[Name, Field(max_length=200)]


class VersionOrder(SomeEngines):
    """`path` is where servers find these weights."""

    version: Annotated[Name, Field(min_length=1, max_length=64)]
    path: Annotated[Name, Field(max_length=500)] = ""


class OrdersQuery(Request):
    orders: dict[Name, Annotated[int, Field(ge=0, le=2**63 - 1)]]
    waited_s: Annotated[float, Field(ge=0)] = 0.0


class OneKey(Request):
    name: str


class LogQuery(Request):
    """The newest orders, or the newest before the order of that number."""

    limit: Limit = 100
    before: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

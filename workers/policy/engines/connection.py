"""JSON over HTTP to one engine: pooled connections, answers as bytes, event streams.

The rule: every read is bounded. An answer is at most as large as its request can explain, and is uncompressed. Its head
must arrive within the time limit; its body, which is sent at once, may be about as slow as a poor network. Error texts,
lists of models and answers to orders are bounded, too.

An idle connection is closed before uvicorn's 5 s are over. If the server closes one at that moment, the next request
fails before any answer has arrived; then another connection is tried at once, as sampling has no side effect. The
environment's proxies are ignored: engines are near the workers.

The progress of the running task's call attributes a passed deadline. An answer in progress counts as the policy's only
as long as tokens arrive. A whole answer is sent after sampling, so its bytes arrive at once; a stream brings a token
every few seconds. An answer whose bytes arrive otherwise is stalled: a deadline that passes meanwhile is attributed to
the engine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx2
import orjson

_STALLED_BODY_S = 5.0
_TOKEN_S = 20.0
_current: ContextVar[Progress | None] = ContextVar("progress", default=None)
_IDLE_S = 4.0
_CONNECT_S = 10.0
_MAX_URLS = 100
_LANE_REQUESTS = 4
"""Number of concurrent requests that share a pool of connections."""
_MAX_STALE = 3
"""Maximum number of connections closed while idle that one request skips."""
_DONE = b"[DONE]"
SMALL_BYTES = 4 * 2**20
"""Maximum bytes of an answer without tokens."""
_BODY_S = 30.0
_MIN_BYTES_S = 2**16
"""The time limit of a body is `_BODY_S`, plus one second for each `_MIN_BYTES_S` bytes received."""
_MAX_PLAIN = 4
"""Maximum length of a key that is not a secret, such as `none`."""
_JSON = {"content-type": "application/json"}
BUSY = (429, 503)
"""The statuses of a temporary refusal."""


class Progress:
    """The progress of one call. Times are of the monotonic clock; None until they occur."""

    def __init__(self) -> None:
        self.body_since: float | None = None
        self.token_at: float | None = None
        self._sent_at: float | None = None

    def restart(self) -> None:
        """Record that a request is sent."""
        self.body_since = self.token_at = None
        self._sent_at = time.monotonic()

    def body(self) -> None:
        """Record that the head of a whole answer has arrived."""
        self.body_since = time.monotonic()

    def token(self) -> None:
        """Record that a stream began, or brought a token."""
        self.token_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds for which a request has had no answer at all; 0 once it has one, infinite if none was sent."""
        if self.body_since is not None or self.token_at is not None:
            return 0.0
        return math.inf if self._sent_at is None else time.monotonic() - self._sent_at

    @property
    def stalled(self) -> str:
        """The reason why the call has no answer although its engine sends bytes; empty if it is not stalled."""
        now = time.monotonic()
        if self.body_since is not None and now - self.body_since > _STALLED_BODY_S:
            return f"has been sending one answer for {now - self.body_since:.0f} s"
        if self.token_at is not None and now - self.token_at > _TOKEN_S:
            return f"has sent no token of an answer for {now - self.token_at:.0f} s"
        return ""


def current_progress() -> Progress:
    """Return the progress of the running task, or an unused one if there is none."""
    return _current.get() or Progress()


@contextmanager
def watched() -> Iterator[Progress]:
    """Record the progress of the call that the block makes."""
    progress, outer = Progress(), _current.get()
    _current.set(progress)
    try:
        yield progress
    finally:
        # Not by a reset token: an abandoned call is closed in another context.
        _current.set(outer)


class Refusal(Exception):
    """An answer with an error status; `body` is its JSON, or its text."""

    def __init__(self, status: int, headers: httpx2.Headers, content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.body = readable(content)

    @property
    def is_busy(self) -> bool:
        """Return whether the same request may succeed a moment later."""
        return self.status in BUSY


class BrokenStream(Exception):
    """A stream that ended without its last event, `[DONE]`."""


class OversizedAnswer(Exception):
    """An answer that is compressed, or larger or slower than its request can explain; it was not read completely."""


FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, BrokenStream, OversizedAnswer, TimeoutError)
"""The errors of a request whose answer is missing or incomplete."""


@dataclass(slots=True)
class _Lane:
    """A connection pool and the number of requests that use it now.

    A pool checks each idle connection at every request: one pool of sixty would cost more than the requests.
    """

    transport: _Transport
    n_requests: int = 0


class EngineConnection:
    """The connections to one engine, for one event loop. The methods raise Refusal, or one of FAILURES."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url = url
        self.root = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_s = timeout_s
        # Prepared once: httpx's client would rebuild these for each request, and handle cookies and redirects.
        timeout = httpx2.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s), pool=None)
        self._extensions = {"timeout": timeout.as_dict()}
        self._headers = {
            "accept": "*/*",
            "accept-encoding": "identity",
            "connection": "keep-alive",
            "user-agent": "rollout-farm",
            "authorization": f"Bearer {key or 'none'}",
        }
        self._urls: dict[str, httpx2.URL] = {}
        self._lanes = [_Lane(self._new_transport())]

    def _new_transport(self) -> _Transport:
        return _Transport(
            # Reading the certificates takes longer than a call; without TLS they are not needed.
            verify=self.url.startswith("https:"),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
        )

    @contextmanager
    def _lent(self) -> Iterator[_Transport]:
        """Lend the first lane that has room for one more request, to keep few connections idle."""
        lane = next((lane for lane in self._lanes if lane.n_requests < _LANE_REQUESTS), None)
        if lane is None:
            lane = _Lane(self._new_transport())
            self._lanes.append(lane)
        lane.n_requests += 1
        try:
            yield lane.transport
        finally:
            lane.n_requests -= 1

    async def get(self, path: str) -> Any:
        """Return the answer's JSON, or its text."""
        return readable(await self._request("GET", path))

    async def get_object(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a route; empty if the route is refused, or its answer is not an object.

        Raises Refusal from a busy server: its kind is still unknown.
        """
        try:
            answer = await self.get(path)
        except Refusal as refusal:
            if refusal.is_busy:
                raise
            return {}
        return answer if isinstance(answer, dict) else {}

    async def post(self, path: str, body: Any = None) -> Any:
        """Return the answer's JSON, or its text. With None, no body is sent."""
        return readable(await self._request("POST", path, None if body is None else orjson.dumps(body)))

    async def ask(self, path: str, body: bytes, headers: dict[str, str], most: int) -> bytes:
        """Return the unparsed answer, at most `most` bytes, to a JSON body."""
        return await self._request("POST", path, body, headers, most)

    async def status(self, path: str, timeout_s: float) -> int:
        """Return the status of a GET; 0 if there is none within `timeout_s`. Raises only when cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._request("GET", path)
                return 200
        except Refusal as refusal:
            return refusal.status
        except FAILURES:
            return 0

    @asynccontextmanager
    async def events(
        self, path: str, body: bytes, headers: dict[str, str], most: int, *, ends_with_done: bool = True
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the events of a stream, each of at most `most` bytes; an answer that is not a stream is one event.

        Iterating raises BrokenStream if the stream `ends_with_done` but its last event is not `[DONE]`. The caller must
        limit the total time.
        """
        async with self._answer("POST", path, body, headers) as response:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                current_progress().token()
                yield _data(response.aiter_raw(), most, ends_with_done)
            else:
                yield _whole(response, most)

    async def aclose(self) -> None:
        for lane in self._lanes:
            await lane.transport.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        most: int = SMALL_BYTES,
    ) -> bytes:
        async with self._answer(method, path, content, headers) as response:
            return await _content(response, most)

    def _url(self, path: str) -> httpx2.URL:
        url = self._urls.get(path)
        if url is None:
            url = httpx2.URL(self.root + path)
            if len(self._urls) < _MAX_URLS:
                self._urls[path] = url
        return url

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str] | None
    ) -> AsyncIterator[httpx2.Response]:
        """Yield the head of an answer, with its body unread. Raises Refusal for an error status."""
        sent = self._headers | (_JSON if content is not None else {}) | (headers or {})
        with self._lent() as transport:
            request = httpx2.Request(
                method, self._url(path), content=content, headers=sent, extensions=self._extensions
            )
            current_progress().restart()
            # A head that arrives byte by byte never hits a read timeout.
            async with asyncio.timeout(self._timeout_s + _CONNECT_S):
                response = await transport.handle_async_request(request)
                response.request = request
            try:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise OversizedAnswer("compresses its answers without being asked to")
                if not response.is_success:
                    refused = without_key(await _content(response, SMALL_BYTES), self._key)
                    raise Refusal(response.status_code, response.headers, refused)
                yield response
            finally:
                await response.aclose()


def most_bytes(n_sent: int, max_tokens: int) -> int:
    """Return the maximum bytes of an answer to a request of `n_sent` bytes that has up to `max_tokens` tokens.

    A token takes some hundred bytes with its log-probability, and 2 kB with all that an engine may add. The prompt is
    repeated at most; each of its tokens was sent in four bytes or more.
    """
    return 2**20 + 256 * n_sent + 2048 * max_tokens


class _Transport(httpx2.AsyncHTTPTransport):
    """A transport that skips connections that the server closed while they were idle."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        for _ in range(_MAX_STALE):
            seen = _Seen()
            request.extensions = {**request.extensions, "trace": seen}
            try:
                return await super().handle_async_request(request)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                if seen.connecting:
                    raise
        return await super().handle_async_request(request)


class _Seen:
    """A trace hook that records whether a request opened a new connection, so that its failure is a real one."""

    def __init__(self) -> None:
        self.connecting = False

    async def __call__(self, event: str, _: dict[str, Any]) -> None:
        self.connecting = self.connecting or event.startswith("connection.connect")


async def _content(response: httpx2.Response, most: int) -> bytes:
    """Return the whole body. Raises OversizedAnswer if it is too large, or slower than a poor network."""
    chunks, n = [], 0
    loop = asyncio.get_running_loop()
    began = loop.time()
    current_progress().body()
    try:
        async with asyncio.timeout(_BODY_S) as limit:
            async for chunk in response.aiter_raw():
                chunks.append(chunk)
                n += len(chunk)
                if n > most:
                    raise OversizedAnswer(f"sends more than {most} bytes, more than its request can explain")
                limit.reschedule(began + _BODY_S + n / _MIN_BYTES_S)
    except TimeoutError:
        raise OversizedAnswer(
            f"has sent {n} bytes of one answer in {loop.time() - began:.0f} s, still incomplete"
        ) from None
    return b"".join(chunks)


async def _data(chunks: AsyncIterator[bytes], most: int, ends_with_done: bool) -> AsyncIterator[bytes]:
    """Yield the data lines; the rest of the body is read, too, so that the connection can be reused."""
    rest, done = b"", False
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > most:
            raise OversizedAnswer(f"sends an event of more than {most} bytes, more than its request can explain")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                done = done or data == _DONE
                if not done:
                    yield data
    if ends_with_done and not done:
        raise BrokenStream("the stream ended before it was complete")


async def _whole(response: httpx2.Response, most: int) -> AsyncIterator[bytes]:
    yield await _content(response, most)


def without_key(content: bytes, key: str) -> bytes:
    """Mask the key in an error text, which a server may repeat and every user may see."""
    return content.replace(key.encode(), b"***") if len(key) > _MAX_PLAIN else content


def readable(content: bytes) -> Any:
    """Return the parsed JSON, or the text if it is none."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")

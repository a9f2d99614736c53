"""JSON over HTTP to one engine: pooled connections, bytes in and out, events of a stream.

An idle connection is given up before uvicorn's 5 s are over. One that the server closed at that very moment fails with
the next request before any answer has come; then another is tried at once, as sampling has no side effect. The
environment's proxies are not used: engines are near.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import orjson

_IDLE_S = 4.0
_CONNECT_S = 10.0
_MAX_STALE = 3
"""How many connections that were closed while idle are passed over for one request."""
_DONE = b"[DONE]"
_LONGEST_PLAIN = 4
"""A key no longer than this, such as `none`, is no secret."""
_JSON = {"content-type": "application/json"}


class Refusal(Exception):
    """An answer with an error status; `body` is its JSON, or its text."""

    def __init__(self, status: int, headers: httpx2.Headers, content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.body = readable(content)


class BrokenStream(Exception):
    """The events ended before the server said that they were all."""


FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, BrokenStream)
"""What a request raises that got no answer, or not all of it."""


class Connection:
    """One engine's connections, for one event loop. Its methods raise Refusal, or one of FAILURES."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self.client = httpx2.AsyncClient(
            # Reading the certificates takes longer than a call; without TLS nobody looks at them.
            transport=_Transport(
                verify=url.startswith("https:"),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
            ),
            timeout=httpx2.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s), pool=None),
            headers={"authorization": f"Bearer {key or 'none'}", "accept-encoding": "identity"},
        )

    async def get(self, path: str) -> Any:
        """The answer's JSON, or its text."""
        return readable(await self._request("GET", path))

    async def post(self, path: str, body: Any = None) -> Any:
        """The answer's JSON, or its text. A body of None sends none."""
        return readable(await self._request("POST", path, None if body is None else orjson.dumps(body)))

    async def ask(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """The answer to a JSON body, unread."""
        return await self._request("POST", path, body, headers)

    async def status(self, path: str, timeout_s: float) -> int:
        """The status of a GET within a time; 0 if there is none. Never raises but when cancelled."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await self.client.get(self.root + path)).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
            return 0

    @asynccontextmanager
    async def events(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The data of each event of a stream; an answer that is no stream is one event."""
        async with self.client.stream("POST", self.root + path, content=body, headers=_JSON | headers) as response:
            if response.is_error:
                raise Refusal(response.status_code, response.headers, without_key(await response.aread(), self._key))
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                yield _data(response.aiter_bytes())
            else:
                yield _whole(response)

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _request(
        self, method: str, path: str, content: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        sent = (_JSON if content is not None else {}) | (headers or {})
        response = await self.client.request(method, self.root + path, content=content, headers=sent)
        if not response.is_success:
            raise Refusal(response.status_code, response.headers, without_key(response.content, self._key))
        return response.content


class _Transport(httpx2.AsyncHTTPTransport):
    """Passes over connections that the server closed while they were idle."""

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
    """Whether a request began a connection of its own; then nothing was wrong with an idle one."""

    def __init__(self) -> None:
        self.connecting = False

    async def __call__(self, event: str, _: dict[str, Any]) -> None:
        self.connecting = self.connecting or event.startswith("connection.connect")


async def _data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data lines; what follows the last one is read too, so that the connection can be used again."""
    rest, done = b"", False
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                done = done or data == _DONE
                if not done:
                    yield data
    if not done:
        raise BrokenStream("the stream ended before it was complete")


async def _whole(response: httpx2.Response) -> AsyncIterator[bytes]:
    yield await response.aread()


def without_key(content: bytes, key: str) -> bytes:
    """A server may repeat a key that it does not like, and what it says is shown to everybody."""
    return content.replace(key.encode(), b"***") if len(key) > _LONGEST_PLAIN else content


def readable(content: bytes) -> Any:
    """Its JSON, or its text."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")

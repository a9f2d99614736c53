"""Queries to a search engine over HTTP, retried while it is busy or down, within the limit of a tool call.

Only a refused query is the policy's error, and is returned to it. If the service stays down, the key is wrong or an
answer is malformed, the rollout ends with an AgentError: it is retried and never scored, like after any fault of the
farm.
"""

from __future__ import annotations

import asyncio
import random
import time
from email.utils import parsedate_to_datetime
from functools import cache
from ssl import SSLContext

import httpx2

from farm.errors import AgentError, ToolError
from workers.tools.search.results import SearchResult, results_of
from workers.tools.search.search_engines import SearchEngine, SearchQuery

TRY_S = 20.0
"""Seconds for one attempt: a hanging connection must not use up the call."""
PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
MAX_ANSWER_BYTES = 2_000_000

_REFUSED = {400, 413, 414, 422}


class _Busy(Exception):
    """A temporary failure of the engine; `after_s` is its Retry-After in seconds, 0 if it sends none."""

    def __init__(self, trouble: str, after_s: float = 0.0) -> None:
        super().__init__(trouble)
        self.after_s = after_s


@cache
def _certificates() -> SSLContext:
    """Return the system's certificates, loaded once per process, as that takes 30 ms."""
    return httpx2.create_ssl_context()


class SearchClient:
    """Connections to one engine, kept between queries."""

    def __init__(self, engine: SearchEngine) -> None:
        self._engine = engine
        self._client: httpx2.AsyncClient | None = None

    async def results(self, question: SearchQuery, timeout_s: float) -> list[SearchResult]:
        """Return the results. Raises ToolError if the engine refuses the query, AgentError if it is unavailable."""
        answer = await self._answer(self._engine.request(question), time.monotonic() + timeout_s)
        try:
            return results_of(answer)
        except ValueError as error:
            raise self._failed(f"its answer is not what it should be: {error}") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _answer(self, request: httpx2.Request, deadline: float) -> bytes:
        pause_s = PAUSE_S
        while True:
            try_s = max(0.0, min(TRY_S, deadline - time.monotonic()))
            try:
                async with asyncio.timeout(try_s):
                    return await self._try(request)
            except TimeoutError:
                busy = _Busy(f"no answer within {try_s:.3g} s")
            except httpx2.TransportError as error:
                busy = _Busy(f"{type(error).__name__} {error}".strip())
            except _Busy as error:
                busy = error
            # Jitter, so that rejected clients do not all return at once.
            wait_s = max(busy.after_s, pause_s) * random.uniform(1.0, 1.5)  # noqa: S311  (no secret)
            if time.monotonic() + wait_s >= deadline:
                raise self._failed(f"{busy}, and there is no time left to try again")
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try(self, request: httpx2.Request) -> bytes:
        if self._client is None:
            self._client = httpx2.AsyncClient(verify=_certificates(), timeout=None, follow_redirects=False)
        response = await self._client.send(request, stream=True)
        try:
            self._check(response)
            return await self._read(response)
        finally:
            await response.aclose()

    def _check(self, response: httpx2.Response) -> None:
        code = response.status_code
        if response.is_success:
            return
        if code == 429 or code >= 500:
            raise _Busy(f"HTTP {code}", _seconds(response.headers.get("retry-after", "")))
        if code in _REFUSED:
            raise ToolError(
                f"The search engine does not take this query (HTTP {code}). Make it shorter, in plain words."
            )
        raise self._failed(f"it answers HTTP {code}; check FARM_SEARCH and FARM_SEARCH_KEY")

    async def _read(self, response: httpx2.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._failed("its answer is compressed, which it was not asked to be")
        answer = bytearray()
        async for part in response.aiter_raw():
            answer += part
            if len(answer) > MAX_ANSWER_BYTES:
                raise self._failed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def _failed(self, why: str) -> AgentError:
        return AgentError(f"the search engine {self._engine.name} cannot be used: {why}")


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, 10.2.3); 0 if it is neither."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0

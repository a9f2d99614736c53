"""The `search` tool: queries the search engine of FARM_SEARCH from the worker, so that no key is in a sandbox.

It is off by default. If a handler lists it but it is off or misconfigured, the rollout fails before the first model
call, is not retried, and is never scored.

`tavily`        POST https://api.tavily.com/search, see https://docs.tavily.com; `tavily:URL` is a proxy of it.
`searxng:URL`   GET URL/search?q=...&format=json, see https://docs.searxng.org/dev/search_api.html. The instance must
                have `json` under `search.formats` in its settings.
`http:URL`      any other: POST URL, `Content-Type: application/json`, with
                {"query": "...", "max_results": 5, "allowed_domains": [...], "blocked_domains": [...]}
A key is sent as `Authorization: Bearer KEY`. All answer with JSON, best result first:
{"results": [{"title": "...", "url": "https://...", "snippet": "..."}, ...]}. `content` may replace `snippet`, as in
Tavily and SearXNG; other fields are ignored, results without `url` are skipped. Neither the form nor the length of
results is trusted.

A query is retried while the engine is busy or down, within the limit of a tool call. Only a refused query is the
policy's error, and is returned to it. If the service stays down, the key is wrong or an answer is malformed, the
rollout ends with an AgentError: it is retried and never scored, like after any fault of the farm.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from ssl import SSLContext
from typing import Annotated, Any, ClassVar

import httpx2
from pydantic import AliasChoices, BaseModel, Field, StringConstraints, ValidationError

from farm.errors import AgentError, HandlerError, ToolError
from farm.settings import Settings, settings
from workers.plugins.interfaces import Observation, Sandbox
from workers.tools import Arguments

TAVILY_URL = "https://api.tavily.com"

TRY_S = 20.0
"""Seconds for one attempt: a hanging connection must not use up the call."""
PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
MAX_ANSWER_BYTES = 2_000_000

_REFUSED = {400, 413, 414, 422}

MAX_TITLE_CHARS = 200
MAX_URL_CHARS = 500
MAX_SNIPPET_CHARS = 600

_DOMAIN = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

MAX_RESULTS = 10


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """A query to a search engine."""

    query: str
    max_results: int
    domains: Domains


@dataclass(frozen=True, slots=True)
class SearchEngine:
    """One engine. `name` is readable, without the secrets of its URL."""

    name: str
    url: httpx2.URL
    headers: dict[str, str]
    shape: Callable[[SearchEngine, SearchQuery], httpx2.Request]

    def request(self, question: SearchQuery) -> httpx2.Request:
        return self.shape(self, question)


def engine(address: str, key: str) -> SearchEngine:
    """Return the engine of FARM_SEARCH and FARM_SEARCH_KEY. Raises ValueError if they are wrong."""
    kind, _, text = address.strip().partition(":")
    if kind not in _SHAPES or not (text or kind == "tavily"):
        raise ValueError(f"FARM_SEARCH is {_safe(address)!r}: it must be tavily, searxng:URL or http:URL")
    url = _url(text or TAVILY_URL)
    key = key.strip()
    if kind == "tavily" and not key:
        raise ValueError("FARM_SEARCH_KEY is not set: Tavily needs a key")
    if not key.isascii() or not key.isprintable():
        raise ValueError("FARM_SEARCH_KEY has characters that a key cannot have")
    # An uncompressed answer cannot be larger than the bytes sent.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "rollout-farm"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return SearchEngine(f"{kind} at {url.host}", url, headers, _SHAPES[kind])


def _url(text: str) -> httpx2.URL:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"FARM_SEARCH names {_safe(text)!r}, which is not a URL that begins with http:// or https://")
    return url


def _safe(address: str) -> str:
    """Return an address without its user name and password."""
    return address.rpartition("@")[2]


def _below(url: httpx2.URL, name: str) -> httpx2.URL:
    return url.copy_with(path=f"{url.path.rstrip('/')}/{name}")


def _tavily(engine: SearchEngine, question: SearchQuery) -> httpx2.Request:
    body: dict[str, Any] = {"query": question.query, "max_results": question.max_results}
    if question.domains.allowed:
        body["include_domains"] = question.domains.allowed
    if question.domains.blocked:
        body["exclude_domains"] = question.domains.blocked
    return httpx2.Request("POST", _below(engine.url, "search"), headers=engine.headers, json=body)


def _searxng(engine: SearchEngine, question: SearchQuery) -> httpx2.Request:
    params = {"q": question.query, "format": "json"}
    return httpx2.Request("GET", _below(engine.url, "search"), headers=engine.headers, params=params)


def _http(engine: SearchEngine, question: SearchQuery) -> httpx2.Request:
    body = {
        "query": question.query,
        "max_results": question.max_results,
        "allowed_domains": question.domains.allowed,
        "blocked_domains": question.domains.blocked,
    }
    return httpx2.Request("POST", engine.url, headers=engine.headers, json=body)


_SHAPES = {"tavily": _tavily, "searxng": _searxng, "http": _http}


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


class SearchResult(BaseModel):
    """One page of the results."""

    url: str
    title: str | None = None
    snippet: str | None = Field(default=None, validation_alias=AliasChoices("snippet", "content"))


def results_of(answer: bytes) -> list[SearchResult]:
    """Return the results of an engine's answer. Raises ValueError if it is not the JSON described above."""
    try:
        body: Any = json.loads(answer)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    entries = body.get("results") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it has no list of `results`")
    results = []
    for each in entries:
        try:
            results.append(SearchResult.model_validate(each))
        except ValidationError:
            continue
    return results


def format_results(results: Sequence[SearchResult]) -> str:
    """Return the results as numbered paragraphs; a page cannot fake further results."""
    return "\n\n".join(f"{number}. {_paragraph(result)}" for number, result in enumerate(results, start=1))


def _paragraph(result: SearchResult) -> str:
    title = _flat(result.title or "", MAX_TITLE_CHARS) or "(no title)"
    rows = [title, _flat(result.url, MAX_URL_CHARS), _flat(result.snippet or "", MAX_SNIPPET_CHARS)]
    return "\n   ".join(row for row in rows if row)


def _flat(text: str, max_chars: int) -> str:
    """Return a text on one line, without unprintable characters, at most `max_chars` long."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * max_chars])
    flat = " ".join(printable.split())
    return flat if len(flat) <= max_chars else f"{flat[:max_chars]}..."


@dataclass(frozen=True, slots=True)
class Domains:
    """Allowed and blocked domains, including subdomains. Empty `allowed` allows all; blocking takes precedence."""

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    @classmethod
    def of(cls, allowed: str, blocked: str) -> Domains:
        """Parse comma-separated lists. Raises ValueError, as a misspelt domain would silently block nothing."""
        return cls(_split(allowed), _split(blocked))

    def let_through(self, url: str) -> bool:
        """Return whether a result may be shown; always False if it is not a web page."""
        try:
            host = _host(url)
        except ValueError:
            return False
        return not _within(host, self.blocked) and (not self.allowed or _within(host, self.allowed))


def _split(domains: str) -> tuple[str, ...]:
    names = [name.strip().removeprefix("*.").lstrip(".") for name in domains.split(",") if name.strip()]
    return tuple(_host(f"https://{name}", domain_only=True) for name in names)


def _host(url: str, *, domain_only: bool = False) -> str:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    host = parsed.raw_host.decode("ascii").lower().rstrip(".")
    if parsed.scheme not in ("http", "https") or not _DOMAIN.fullmatch(host):
        raise ValueError(f"{url!r} is not the URL of a web page")
    if domain_only and parsed != httpx2.URL(f"https://{parsed.host}"):
        raise ValueError(f"{url.removeprefix('https://')!r} is not a domain")
    return host


def _within(host: str, domains: tuple[str, ...]) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)


class SearchArguments(Arguments):
    query: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=400)] = Field(
        description="What to look for: a few words."
    )
    max_results: int = Field(default=5, ge=1, le=MAX_RESULTS, description="How many results to show at most.")


class SearchTool:
    """A `workers.plugins.interfaces.Tool`. Needs no sandbox. `chosen` defaults to the settings of the process."""

    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Search the web. Gives the title, the address and a few lines of each page that was found; the pages "
        "themselves cannot be opened."
    )
    arguments: ClassVar[type[BaseModel]] = SearchArguments

    def __init__(self, sandbox: Sandbox | None, chosen: Settings | None = None) -> None:
        """Raise HandlerError, not retryable, if search is off or its settings are wrong."""
        chosen = chosen or settings()
        if not chosen.search:
            raise HandlerError(
                "the tool `search` is off: set FARM_SEARCH on every node, or remove it from the handler's tools",
                retryable=False,
            )
        try:
            self._asking = SearchClient(engine(chosen.search, chosen.search_key))
            self._domains = Domains.of(chosen.search_allowed, chosen.search_blocked)
        except ValueError as error:
            raise HandlerError(f"the tool `search` cannot be used: {error}", retryable=False) from None

    async def call(self, arguments: SearchArguments, timeout_s: float) -> Observation:
        """Return numbered results. Raises ToolError for a refused query, AgentError for an unavailable engine."""
        question = SearchQuery(arguments.query, arguments.max_results, self._domains)
        results = await self._asking.results(question, timeout_s)
        shown = [result for result in results if self._domains.let_through(result.url)][: arguments.max_results]
        return Observation(format_results(shown) or "Nothing was found. Try other words.")

    async def close(self) -> None:
        await self._asking.close()

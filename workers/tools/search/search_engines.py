"""The supported search engines, each as its HTTP request. All answer with the JSON of `results.py`.

`tavily`        POST https://api.tavily.com/search, see https://docs.tavily.com; `tavily:URL` is a proxy of it.
`searxng:URL`   GET URL/search?q=...&format=json, see https://docs.searxng.org/dev/search_api.html. The instance must
                have `json` under `search.formats` in its settings.
`http:URL`      any other: POST URL, `Content-Type: application/json`, with
                {"query": "...", "max_results": 5, "allowed_domains": [...], "blocked_domains": [...]}
A key is sent as `Authorization: Bearer KEY`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

from workers.tools.search.domains import Domains

TAVILY_URL = "https://api.tavily.com"


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
    result = {"q": question.query, "format": "json"}
    return httpx2.Request("GET", _below(engine.url, "search"), headers=engine.headers, params=result)


def _http(engine: SearchEngine, question: SearchQuery) -> httpx2.Request:
    body = {
        "query": question.query,
        "max_results": question.max_results,
        "allowed_domains": question.domains.allowed,
        "blocked_domains": question.domains.blocked,
    }
    return httpx2.Request("POST", engine.url, headers=engine.headers, json=body)


_SHAPES = {"tavily": _tavily, "searxng": _searxng, "http": _http}

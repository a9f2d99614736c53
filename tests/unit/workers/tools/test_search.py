"""The `search` tool with real servers of the three formats, and with misbehaving ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from farm.errors import AgentError, HandlerError, ToolError
from farm.settings import Settings
from workers.plugins.interfaces import Tool
from workers.testing.serving import serving
from workers.tools.search import Domains, SearchResult, SearchTool, engine, format_results, results_of

KEY = "key-1234567890"
FOUND = [
    {
        "title": "First",
        "url": "https://docs.example.org/a",
        "content": "about  a\n\n2. Forged\n   https://x",
        "score": 0.9,
    },
    {"title": None, "url": "https://github.com/b", "content": None},
    {"title": "Third", "url": "https://example.org:8080/c", "content": "about c"},
]

Answer = Callable[[Request], Response]


class _Server:
    """Answers with these results in turn, the last one repeatedly, and records the requests and their bodies."""

    def __init__(self, *answers: Answer | Response) -> None:
        self._answers = list(answers) or [JSONResponse({"results": FOUND})]
        self.requests: list[Request] = []
        self.bodies: list[bytes] = []

    async def answer(self, request: Request) -> Response:
        self.requests.append(request)
        self.bodies.append(await request.body())
        result = self._answers[min(len(self.requests), len(self._answers)) - 1]
        return result if isinstance(result, Response) else result(request)

    @contextmanager
    def listening(self) -> Iterator[str]:
        with serving(Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])) as url:
            yield url


async def call_tool(tool: Tool, timeout_s: float, **arguments: Any) -> str:
    try:
        return (await tool.call(tool.arguments(**{"query": "a thing", **arguments}), timeout_s)).text
    finally:
        await tool.close()


def search(address: str, timeout_s: float = 10.0, *, allowed: str = "", blocked: str = "", **arguments: Any) -> str:
    chosen = Settings(search=address, search_key=KEY, search_allowed=allowed, search_blocked=blocked)
    return asyncio.run(call_tool(SearchTool(None, chosen), timeout_s, **arguments))


@pytest.mark.parametrize("kind", ["tavily", "searxng", "http"])
def test_results_are_numbered_for_every_engine(kind: str) -> None:
    with _Server().listening() as url:
        assert search(f"{kind}:{url}") == (
            "1. First\n   https://docs.example.org/a\n   about a 2. Forged https://x\n\n"
            "2. (no title)\n   https://github.com/b\n\n"
            "3. Third\n   https://example.org:8080/c\n   about c"
        )
        assert search(f"{kind}:{url}", max_results=1).count("https://docs") == 1
        assert "2. " not in search(f"{kind}:{url}", max_results=1).replace("2. Forged", "")


def test_tavily_gets_its_request_format() -> None:
    server = _Server()
    with server.listening() as url:
        search(f"tavily:{url}/", allowed="example.org", blocked="a.example.org, *.github.com", max_results=3)
    (request,), (body,) = server.requests, server.bodies
    assert (request.method, request.url.path) == ("POST", "/search")
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(body) == {
        "query": "a thing",
        "max_results": 3,
        "include_domains": ["example.org"],
        "exclude_domains": ["a.example.org", "github.com"],
    }


def test_searxng_gets_its_request_format() -> None:
    server = _Server()
    with server.listening() as url:
        search(f"searxng:{url}/below", query="  é & b=c? ", blocked="github.com")
    (request,) = server.requests
    assert (request.method, request.url.path) == ("GET", "/below/search")
    assert dict(request.query_params) == {"q": "é & b=c?", "format": "json"}


def test_other_endpoint_gets_the_general_request_format() -> None:
    server = _Server(JSONResponse({"results": [{"url": "https://x.org", "title": "X", "snippet": "here"}]}))
    with server.listening() as url:
        assert search(f"http:{url}/v1/find?index=7") == "1. X\n   https://x.org\n   here"
    (request,), (body,) = server.requests, server.bodies
    assert (request.method, request.url.path, request.url.query) == ("POST", "/v1/find", "index=7")
    assert request.headers["content-type"] == "application/json"
    assert json.loads(body) == {"query": "a thing", "max_results": 5, "allowed_domains": [], "blocked_domains": []}


def test_domains_are_filtered_whatever_the_engine_returns() -> None:
    with _Server().listening() as url:
        assert "github" not in search(f"searxng:{url}", blocked="GitHub.com.")
        assert search(f"searxng:{url}", allowed="docs.example.org").count("https://") == 2
        assert search(f"searxng:{url}", allowed="example.org", blocked="docs.example.org").startswith("1. Third")
        assert search(f"searxng:{url}", allowed="nowhere.org") == "Nothing was found. Try other words."


@pytest.mark.parametrize(
    ("url", "let_through"),
    [
        ("https://example.org/x", True),
        ("https://notgithub.com/", True),
        ("https://github.com.example.org/", True),
        ("https://github.com", False),
        ("https://GITHUB.com./x", False),
        ("http://gist.github.com:80/x", False),
        ("https://user@github.com/x", False),
        ("https://example.org@github.com/x", False),
        ("https://xn--bcher-kva.de/", False),
        ("https://bücher.de/", False),
        ("file:///etc/passwd", False),
        ("javascript:alert(1)", False),
        ("//example.org", False),
        ("https://", False),
        ("https://[::1", False),
        ("", False),
    ],
)
def test_blocked_domains(url: str, let_through: bool) -> None:
    assert Domains.of("", "github.com,bücher.de").let_through(url) is let_through


@given(st.text() | st.text().map("https://".__add__))
def test_no_address_breaks_the_filter(url: str) -> None:
    assert Domains.of("example.org", "").let_through(url) in (True, False)
    assert isinstance(format_results([SearchResult(url=url, title=url)]), str)


@pytest.mark.parametrize(
    "domains", ["git hub.com", "github.com/astropy", "https://github.com", "a,,b/c", "*", "a@b.com"]
)
def test_misspelt_domain_disables_the_tool(domains: str) -> None:
    for chosen in (Settings(search_blocked=domains), Settings(search_allowed=domains)):
        with pytest.raises(HandlerError, match="the tool `search` cannot be used"):
            SearchTool(None, chosen.model_copy(update={"search": "searxng:http://127.0.0.1:9"}))


def test_search_is_off_by_default() -> None:
    with pytest.raises(HandlerError, match="is off: set FARM_SEARCH on every node") as raised:
        SearchTool(None, Settings(search=""))
    assert not raised.value.retryable


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SEARCH", "tavily")
    monkeypatch.setenv("FARM_SEARCH_KEY", KEY)
    monkeypatch.setenv("FARM_SEARCH_BLOCKED", "github.com")
    chosen = Settings()
    assert engine(chosen.search, chosen.search_key).headers["Authorization"] == f"Bearer {KEY}"
    assert chosen.search_blocked == "github.com"
    assert KEY not in repr(chosen)


@pytest.mark.parametrize(
    ("address", "key", "complaint"),
    [
        ("google", "", "FARM_SEARCH is 'google': it must be tavily, searxng:URL or http:URL"),
        ("searxng", "", "it must be tavily, searxng:URL or http:URL"),
        ("tavily", "", "FARM_SEARCH_KEY is not set"),
        ("tavily", "a\nb", "FARM_SEARCH_KEY has characters that a key cannot have"),
        ("searxng:file:///etc/passwd", "", "not a URL that begins with http:// or https://"),
        ("http://search.example/find", "", "not a URL that begins with http:// or https://"),
        ("http:https://", "", "not a URL that begins with http:// or https://"),
        ("http:ftp://user:secret@host/", "", "names 'host/'"),
        ("searxng:http://[::1", "", "not a URL that begins with http:// or https://"),
    ],
)
def test_wrong_settings_are_reported_before_any_request(address: str, key: str, complaint: str) -> None:
    with pytest.raises(HandlerError, match="the tool `search` cannot be used") as raised:
        SearchTool(None, Settings(search=address, search_key=key))
    assert complaint in str(raised.value)
    assert not raised.value.retryable


@pytest.mark.parametrize("code", [429, 500])
def test_busy_engine_is_retried(code: int) -> None:
    server = _Server(PlainTextResponse("busy", code), JSONResponse({"results": FOUND}))
    with server.listening() as url:
        assert search(f"searxng:{url}").startswith("1. First")
    assert len(server.requests) == 2


def test_retry_after_is_respected() -> None:
    for after in ("30", formatdate(time.time() + 30, usegmt=True)):
        server = _Server(PlainTextResponse("later", 429, {"Retry-After": after}))
        with server.listening() as url, pytest.raises(AgentError, match="HTTP 429, and there is no time left"):
            search(f"searxng:{url}", timeout_s=10.0)
        assert len(server.requests) == 1
    server = _Server(PlainTextResponse("later", 429, {"Retry-After": "0.1"}), JSONResponse({"results": FOUND}))
    with server.listening() as url:
        assert search(f"searxng:{url}").startswith("1. First")


@pytest.mark.parametrize("after", ["3600", "inf", "nan", "-5", "soon", "Thu, 01 Jan 1970 00:00:00 GMT", "9" * 400])
def test_engine_that_stays_busy_is_an_agent_error(after: str) -> None:
    with (
        _Server(PlainTextResponse("no", 503, {"Retry-After": after})).listening() as url,
        pytest.raises(
            AgentError, match=r"searxng at 127.0.0.1 cannot be used: HTTP 503, and there is no time"
        ) as raised,
    ):
        search(f"searxng:{url}", timeout_s=0.3)
    assert raised.value.retryable


@pytest.mark.parametrize("code", [400, 413, 414, 422])
def test_refused_query_is_reported_to_the_model(code: int) -> None:
    server = _Server(PlainTextResponse("Query is too long", code))
    with server.listening() as url, pytest.raises(ToolError, match=f"does not take this query .HTTP {code}."):
        search(f"searxng:{url}")
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", [401, 402, 403, 404, 432])
def test_wrong_key_is_an_agent_error(code: int) -> None:
    server = _Server(PlainTextResponse(f"no such key: {KEY}", code))
    with server.listening() as url, pytest.raises(AgentError, match=f"HTTP {code}; check FARM_SEARCH") as raised:
        search(f"searxng:{url}")
    assert KEY not in str(raised.value)
    assert len(server.requests) == 1


def test_redirects_are_not_followed() -> None:
    reached = _Server()
    with reached.listening() as elsewhere:
        for target in ("file:///etc/passwd", f"{elsewhere}/search", "/again"):
            server = _Server(RedirectResponse(target, 302))
            with server.listening() as url, pytest.raises(AgentError, match="it answers HTTP 302"):
                search(f"searxng:{url}")
            assert len(server.requests) == 1
    assert reached.requests == []


async def never(request: Request) -> Response:
    await request.body()
    await request.receive()  # arrives once the client has disconnected
    return Response()


def dripping(request: Request) -> Response:
    async def drops() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    return StreamingResponse(drops())


@pytest.mark.parametrize("answer", [never, dripping])
def test_hanging_engine_times_out(answer: Any) -> None:
    with (
        serving(Starlette(routes=[Route("/search", answer)])) as url,
        pytest.raises(AgentError, match="no answer within"),
    ):
        search(f"searxng:{url}", timeout_s=0.5)


def test_unreachable_engine_is_an_agent_error() -> None:
    with pytest.raises(AgentError, match="cannot be used: ConnectError"):
        search("searxng:http://127.0.0.1:9", timeout_s=0.3)


def test_engine_that_closes_the_connection_is_retried() -> None:
    n_calls = 0

    def hang_up_twice() -> None:
        nonlocal n_calls
        while n_calls < 2:
            listener.accept()[0].close()
            n_calls += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        thread = threading.Thread(target=hang_up_twice)
        thread.start()
        with pytest.raises(AgentError, match="and there is no time left to try again"):
            search(f"searxng:http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1.5)
        thread.join()
    assert n_calls == 2


def endless(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1_000_000

    return StreamingResponse(parts(), media_type="application/json")


def compressed(request: Request) -> Response:
    # a hundred members: compressing as much at once takes a busy machine longer than the search waits
    return Response(gzip.compress(b" " * 1_000_000) * 100, headers={"content-encoding": "gzip"})


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (PlainTextResponse("<html>"), "its answer is not what it should be"),
        (PlainTextResponse(""), "its answer is not what it should be"),
        (PlainTextResponse("[" * 100_000), "its answer is not what it should be"),
        (Response(b"\xff\xfe\x00"), "its answer is not what it should be"),
        (JSONResponse([]), "no list of `results`"),
        (JSONResponse({"results": {"a": 1}}), "no list of `results`"),
        (JSONResponse({"error": "x"}), "no list of `results`"),
        (endless, "its answer has more than 2000000 bytes"),
        (compressed, "its answer is compressed"),
    ],
)
def test_garbage_is_an_agent_error(answer: Answer | Response, complaint: str) -> None:
    with _Server(answer).listening() as url, pytest.raises(AgentError, match=complaint):
        search(f"http:{url}")


def test_results_are_limited_and_sanitized() -> None:
    wild = [
        {"url": "https://a.org/" + "u" * 100_000, "title": "t" * 100_000, "content": "c" * 100_000},
        {"url": "https://b.org", "title": "\ud800\x1b[31m\0 a\u2028b", "content": "\u202eright"},
        {"url": 5},
        {"title": "no address"},
        "text",
        None,
        {"url": "https://c.org", "title": ["x"]},
    ]
    shown = format_results(results_of(json.dumps({"results": wild}).encode()))
    assert len(shown) < 2000
    assert shown.encode().decode().endswith("2. [31m a b\n   https://b.org\n   right")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["results", "url", "title", "content", "x"]), inner)
        ),
    )
)
def test_any_answer_is_parsed_or_refused(body: Any) -> None:
    try:
        format_results(results_of(json.dumps(body).encode())).encode()
    except ValueError:
        assert not isinstance(body, dict) or not isinstance(body.get("results"), list)


@pytest.mark.parametrize("query", ["", "   ", "x" * 401])
def test_query_length_is_limited(query: str) -> None:
    with pytest.raises(ValueError, match="String should have at"):
        search("searxng:http://127.0.0.1:9", query=query)


def test_hundred_concurrent_and_cancelled_searches() -> None:
    async def all_at_once(url: str) -> None:
        tools = [SearchTool(None, Settings(search=f"searxng:{url}")) for _ in range(100)]
        assert len(set(await asyncio.gather(*(call_tool(tool, 20.0) for tool in tools)))) == 1
        tool = SearchTool(None, Settings(search="searxng:http://127.0.0.1:9"))
        task = asyncio.create_task(call_tool(tool, 60.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await tool.close()

    with _Server().listening() as url:
        asyncio.run(all_at_once(url))


def test_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), _Server().listening() as url:
        search(f"tavily:{url}")
    assert KEY not in caplog.text

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2
import orjson
import pytest

from workers.policy.engines.connection import BrokenStream, EngineConnection, Refusal, without_key

OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n{"x": 1}'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
MOST = 1000
Script = Callable[["_Server", asyncio.StreamWriter], Awaitable[None]]


class _Server:
    """Handles its requests, in order, as a test sets; None closes the connection without an answer."""

    def __init__(self, *scripts: bytes | Script | None) -> None:
        self._scripts = list(scripts)
        self.requests: list[bytes] = []
        self.n_connections = self.n_open = 0
        self.closed, self.empty = asyncio.Event(), asyncio.Event()
        self.requested = asyncio.Event()

    async def __aenter__(self) -> _Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.n_open += 1
        try:
            while not reader.at_eof():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                self.requested.set()
                script = self._scripts.pop(0)
                if script is None:
                    break
                if isinstance(script, bytes):
                    writer.write(script)
                    await writer.drain()
                    if b"connection: close" in script:
                        break
                else:
                    await script(self, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.closed.set()
            self.n_open -= 1
            if not self.n_open:
                self.empty.set()
            writer.close()


def trying(check: Callable[[_Server, EngineConnection], Awaitable[None]], *scripts: bytes | Script | None) -> None:
    async def run() -> None:
        async with _Server(*scripts) as server:
            connection = EngineConnection(f"{server.url}/v1", "secret", 20.0)
            try:
                async with asyncio.timeout(120):
                    await check(server, connection)
            finally:
                await connection.aclose()

    asyncio.run(run())


async def events_of(connection: EngineConnection) -> list[bytes]:
    async with connection.events("/p", b"{}", {}, MOST) as events:
        return [event async for event in events]


def test_request_bytes() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        assert await connection.ask("/p", b"[1]", {"x-session-id": "r1"}, MOST) == b'{"x": 1}'
        assert await connection.get("/v1/models") == {"x": 1}
        sent = server.requests[0].lower()
        for part in (
            b"post /p ",
            b"authorization: bearer secret",
            b"content-type: application/json",
            b"x-session-id: r1",
        ):
            assert part in sent
        assert sent.endswith(b"[1]")
        assert b"GET /v1/models " in server.requests[1]
        assert server.n_connections == 1

    trying(check, OK, OK)


def test_idle_connection_that_was_closed_is_replaced() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        await connection.get("/1")
        # The server reads the second request and closes, like one whose idle timeout expired at that moment.
        assert await connection.ask("/2", b"{}", {}, MOST) == b'{"x": 1}'
        assert [head.split(b" ")[1] for head in server.requests] == [b"/1", b"/2", b"/2"]
        assert server.n_connections == 2

    trying(check, OK, None, OK)


def test_closed_new_connection_is_a_failure() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        with pytest.raises(httpx2.RemoteProtocolError):
            await connection.get("/1")
        assert len(server.requests) == 1

    trying(check, None, OK)


def test_partial_answer_is_not_requested_again() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        await connection.get("/1")
        with pytest.raises(httpx2.RemoteProtocolError):
            await connection.get("/2")
        assert len(server.requests) == 2

    trying(check, OK, OK.replace(b"length: 8\r\n", b"length: 80\r\nconnection: close\r\n"), OK)


def test_error_status_is_a_refusal() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        for kind in "json", "text":
            with pytest.raises(Refusal) as refusal:
                await connection.get(f"/{kind}")
            assert refusal.value.status == 429
            assert refusal.value.headers["Retry-After"] == "7"
            assert refusal.value.body == ({"x": 1} if kind == "json" else "<html>")
        with pytest.raises(Refusal, match="429"):
            await events_of(connection)

    busy = OK.replace(b"200 OK", b"429 Busy\r\nretry-after: 7")
    trying(check, busy, busy.replace(b'{"x": 1}', b"<html>").replace(b"length: 8", b"length: 6"), busy)


def test_key_that_a_server_repeats_is_not_shown() -> None:
    assert without_key(b'{"error": "no such key: sk-12345"}', "sk-12345") == b'{"error": "no such key: ***"}'
    assert without_key(b"none of them", "none") == b"none of them"
    assert without_key(b"nothing", "") == b"nothing"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_arrive_one_by_one(end: bytes) -> None:
    async def script(server: _Server, writer: asyncio.StreamWriter) -> None:
        data = end.join([b'data: {"a":"\xc3\xbc"}', b": a comment", b'data:{"a":2}', b"data: [DONE]", b""])
        writer.write(STREAM)
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
        writer.close()

    async def check(server: _Server, connection: EngineConnection) -> None:
        assert [orjson.loads(event) for event in await events_of(connection)] == [{"a": "ü"}, {"a": 2}]

    trying(check, script)


def test_answer_that_is_not_a_stream_is_one_event() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        assert await events_of(connection) == [b'{"x": 1}']
        assert await events_of(connection) == [b'{"x": 1}']
        assert server.n_connections == 1

    trying(check, OK, OK)


def test_stream_that_ends_early_is_broken() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        with pytest.raises(BrokenStream, match="before it was complete"):
            await events_of(connection)

    trying(check, STREAM + b'data: {"a":1}\n\n')


def test_connection_is_reused_after_a_stream() -> None:
    data = b'data: {"a":1}\n\ndata: [DONE]\n\n'
    whole = STREAM.replace(b"connection: close", b"content-length: %d" % len(data)) + data

    async def check(server: _Server, connection: EngineConnection) -> None:
        assert len(await events_of(connection)) == len(await events_of(connection)) == 1
        assert server.n_connections == 1

    trying(check, whole, whole)


@pytest.mark.parametrize("begun", [b"", STREAM + b'data: {"a":1}\n\n'])
def test_cancelled_call_closes_its_connection(begun: bytes) -> None:
    async def hang(server: _Server, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        await writer.drain()

    async def check(server: _Server, connection: EngineConnection) -> None:
        task = asyncio.create_task(events_of(connection) if begun else connection.ask("/p", b"{}", {}, MOST))
        await server.requested.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.closed.wait()

    trying(check, hang)


def test_status_never_raises() -> None:
    async def check(server: _Server, connection: EngineConnection) -> None:
        assert await connection.status("/health", 20.0) == 200
        assert await connection.status("/health", 20.0) == 0
        assert await EngineConnection("http://127.0.0.1:1/v1", "", 1.0).status("/health", 20.0) == 0
        assert await EngineConnection("nonsense", "", 1.0).status("/health", 20.0) == 0

    trying(check, OK, b"what?\r\nconnection: close\r\n\r\n")


def test_concurrent_requests_have_a_connection_each_and_all_are_closed() -> None:
    n_requests = 11

    async def run() -> None:
        all_there = asyncio.Event()

        async def answer_together(server: _Server, writer: asyncio.StreamWriter) -> None:
            if len(server.requests) == n_requests:
                all_there.set()
            await all_there.wait()
            writer.write(OK)
            await writer.drain()

        async with _Server(*[answer_together] * n_requests, *[OK] * 2) as server:
            connection = EngineConnection(server.url, "", 60.0)
            answers = await asyncio.gather(*(connection.get("/") for _ in range(n_requests)))
            assert answers == [{"x": 1}] * n_requests
            assert server.n_connections == n_requests
            for _ in range(2):
                assert await connection.get("/") == {"x": 1}
            assert server.n_connections == n_requests, "an idle connection is reused"
            await connection.aclose()
            await asyncio.wait_for(server.empty.wait(), 60.0)

    asyncio.run(run())


def test_silent_server_reaches_the_time_limit() -> None:
    async def hang(server: _Server, writer: asyncio.StreamWriter) -> None: ...

    async def run() -> None:
        async with _Server(hang) as server:
            # on a busy machine, connecting takes part of it
            connection = EngineConnection(server.url, "", 1.0)
            with pytest.raises(httpx2.ReadTimeout):
                await connection.get("/")
            assert await connection.status("/", 0.05) == 0
            await connection.aclose()

    asyncio.run(run())

"""A proxy between clients and a Postgres that cuts connections at the moment that a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import make_url

from testkit.private_server import private_folder

_SOCKET = ".s.PGSQL.5432"


class PostgresProxy:
    """Forwards everything until it is set to cut. `url` is that of the database behind it."""

    def __init__(self, database_url: str, folder: Path) -> None:
        behind = make_url(database_url)
        self.url = behind.update_query_dict({"host": str(folder)}).render_as_string(hide_password=False)
        self.n_cut = 0
        self._behind = Path(str(behind.query["host"])) / _SOCKET
        self._socket = folder / _SOCKET
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._commits = 0
        self._made = False
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.back()

    def cut_commits(self, n: int, made: bool) -> None:
        """Cut the connections of the next `n` commits: after they are `made`, so only the answer is lost, or before."""
        self._commits, self._made = n, made

    def away(self) -> None:
        """Cut all connections, and accept no more."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    def back(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    def close(self) -> None:
        self.away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._socket.unlink()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        replies, server = await asyncio.open_unix_connection(self._behind)
        passing = asyncio.create_task(_pass_on(replies, answers))
        try:
            await self._forward(client, server, replies, passing)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            passing.cancel()
            answers.close()
            server.close()
            self._open.discard(task)

    async def _forward(
        self,
        client: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        replies: asyncio.StreamReader,
        passing: asyncio.Task[None],
    ) -> None:
        kind = b""  # the first message has none
        while True:
            length = await client.readexactly(4)
            body = await client.readexactly(struct.unpack("!i", length)[0] - 4)
            if kind == b"Q" and body.startswith(b"COMMIT") and self._commits > 0:
                self._commits -= 1
                self.n_cut += 1
                passing.cancel()
                if self._made:
                    await asyncio.wait([passing])
                    server.write(kind + length + body)
                    await _ready(replies)
                return
            server.write(kind + length + body)
            await server.drain()
            kind = await client.readexactly(1)


async def _pass_on(replies: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while some := await replies.read(65536):
            answers.write(some)
            await answers.drain()
    answers.close()


async def _ready(replies: asyncio.StreamReader) -> None:
    """Wait until the server is ready for the next query, so that the last one is done."""
    while True:
        kind = await replies.readexactly(1)
        length = await replies.readexactly(4)
        await replies.readexactly(struct.unpack("!i", length)[0] - 4)
        if kind == b"Z":
            return


@contextmanager
def between(database_url: str) -> Iterator[PostgresProxy]:
    with private_folder() as folder:
        stands = PostgresProxy(database_url, folder)
        try:
            yield stands
        finally:
            stands.close()

"""A proxy between a farm and its broker's server that cuts connections as networks do: by refusal, or silently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.services.servers.broker import free_ports

_SOME = 65536


class Line:
    """Forwards a fixed TCP port to a server: a Unix socket, or a port of this machine."""

    def __init__(self, server: Path | int) -> None:
        [self.port] = free_ports(1)
        self._server = server
        self._silent = False
        self._n_swallowed = 0
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.restore()

    @property
    def silent(self) -> bool:
        return self._silent

    def refuse(self) -> None:
        """End all connections, and refuse new ones."""
        self._do(self._refuse())

    def drop_data(self) -> None:
        """Drop all data from now on. Connections, new ones too, stay open, but neither side receives anything, nor
        that the other has disconnected."""
        self._silent = True
        self._n_swallowed += 1

    def restore(self) -> None:
        """Forward new connections; those that were swallowed stay broken, whether or not anything was sent."""
        self._silent = False
        self._do(self._listen())

    def close(self) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, requests: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        server = None
        try:
            if self._silent:
                await _swallow(requests)
                return
            n_swallowed = self._n_swallowed
            try:
                replies, server = await self._connect()
            except OSError:  # the server is down; a Unix socket may even lack its file
                return
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(requests, server, n_swallowed))
                both.create_task(self._pass_on(replies, answers, n_swallowed))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for writer in (answers, server):
                if writer is not None:
                    writer.close()
            self._open.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._server, Path):
            return await asyncio.open_unix_connection(self._server)
        return await asyncio.open_connection("127.0.0.1", self._server)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, n_swallowed: int) -> None:
        with suppress(ConnectionError):
            while some := await source.read(_SOME):
                if self._n_swallowed == n_swallowed:
                    target.write(some)
                    await target.drain()
        if self._n_swallowed == n_swallowed:
            # the other half ends with this one
            raise ConnectionResetError


async def _swallow(source: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await source.read(_SOME):
            pass


@contextmanager
def line_to(server: Path | int) -> Iterator[Line]:
    stands = Line(server)
    try:
        yield stands
    finally:
        stands.close()

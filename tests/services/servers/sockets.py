"""A server of scripted bytes: each request is answered by the next script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

ScriptedAnswer: TypeAlias = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def head(media_type: str, length: int | None, *more: str) -> bytes:
    """Return the head of an answer of so many bytes; None for a chunked one."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return "\r\n".join(["HTTP/1.1 200 OK", f"content-type: {media_type}", size, *more, "", ""]).encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Answering:
    """Listens while the block runs; the last script is repeated."""

    def __init__(self, *answers: ScriptedAnswer) -> None:
        self._answers = list(answers)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Answering:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        lines = request.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        await reader.readexactly(length)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, bytes):
            writer.write(answer)
            await writer.drain()
        else:
            await answer(writer)

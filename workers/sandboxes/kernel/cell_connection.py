"""The worker's end of an interpreter's socket: frames of `cell_protocol.py`, on the event loop.

The policy can forge messages, so their size is limited and malformed frames are rejected here.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

from workers.sandboxes.kernel import cell_protocol

Frame: TypeAlias = tuple[dict[str, Any], bytes]

_CHUNK = 1 << 18
_MAX_UNREAD = 64
"""Maximum number of unread frames. An interpreter sends one for each cell."""


class PeerGone(Exception):
    """The process at the other end has ended or violates the protocol."""


class FrameConnection:
    """One connection. Only one call may wait for a frame at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._connection.setblocking(False)
        self._data = bytearray()
        self._unread: deque[Frame] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._descriptors: list[int] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._gone = False
        self._loop.add_reader(connection, self._read)

    def accept_descriptors(self) -> list[int]:
        """Accept a descriptor with the next bytes. The list has it once they have arrived; the caller owns it."""
        self._descriptors = []
        return self._descriptors

    def send(self, head: Mapping[str, Any], body: bytes) -> None:
        """Send a frame, in the background if it is long. `next` reports a closed connection, `send` does not."""
        data = cell_protocol.packed(head, body)
        try:
            n_sent = self._connection.send(data)
        except BlockingIOError:
            n_sent = 0
        except OSError:
            return self._end()
        if n_sent < len(data):
            self._sending = self._loop.create_task(self._send_rest(data[n_sent:]))

    async def _send_rest(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._connection, data)
        except OSError:
            self._end()

    async def next(self, seconds: float) -> Frame | None:
        """Return the next frame; None if none arrives within `seconds`. Raises PeerGone."""
        if not self._unread and not self._gone:
            self._woken = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        if self._unread:
            return self._unread.popleft()
        if self._gone:
            raise PeerGone
        return None

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _read(self) -> None:
        try:
            if self._descriptors is None:
                data = self._connection.recv(_CHUNK)
            else:
                data, result, _, _ = socket.recv_fds(self._connection, _CHUNK, 1)
                self._descriptors += result
                self._descriptors = None
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._end()
        self._data += data
        try:
            self._parse()
        except PeerGone:
            self._end()

    def _parse(self) -> None:
        while len(self._data) >= cell_protocol.HEADER.size:
            n_head, n_body = cell_protocol.HEADER.unpack_from(self._data)
            if (
                n_head > cell_protocol.MAX_HEAD
                or n_body > cell_protocol.MAX_IMAGE_BYTES
                or len(self._unread) == _MAX_UNREAD
            ):
                raise PeerGone
            start = cell_protocol.HEADER.size + n_head
            if len(self._data) < start + n_body:
                return
            head = _object(bytes(self._data[cell_protocol.HEADER.size : start]))
            self._unread.append((head, bytes(self._data[start : start + n_body])))
            del self._data[: start + n_body]
            self._wake()

    def _end(self) -> None:
        self._gone = True
        self._loop.remove_reader(self._connection)
        self._wake()

    def close(self) -> None:
        """Close the connection. Harmless when repeated."""
        if self._connection.fileno() < 0:
            return
        if self._sending is not None:
            self._sending.cancel()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()


def _object(data: bytes) -> dict[str, Any]:
    try:
        result = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone from error
    if not isinstance(result, dict):
        raise PeerGone
    return result

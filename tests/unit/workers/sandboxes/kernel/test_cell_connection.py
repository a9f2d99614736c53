"""Frames and descriptors that an interpreter may send to a worker, and those that it may not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from workers.sandboxes.kernel.cell_protocol import HEADER, MAX_HEAD, MAX_IMAGE_BYTES, packed, receive
from workers.sandboxes.kernel.interpreter import FrameConnection, PeerGone


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[FrameConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    frames = FrameConnection(ours)
    with theirs:
        yield frames, theirs
    frames.close()
    frames.close()


def test_frames_arrive_in_order_however_they_are_split() -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            data = packed({"n": 1}, b"body") + packed({"n": 2}) + packed({"n": 3}, b"x" * 1000)
            for start in range(0, len(data), 7):
                theirs.sendall(data[start : start + 7])
                await asyncio.sleep(0)
            assert [await frames.next(5) for _ in range(3)] == [
                ({"n": 1}, b"body"),
                ({"n": 2}, b""),
                ({"n": 3}, b"x" * 1000),
            ]

    asyncio.run(check())


def test_frame_that_is_late_can_be_received_later() -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            assert await frames.next(0.01) is None
            theirs.sendall(packed({"n": 1}))
            assert await frames.next(5) == ({"n": 1}, b"")
            waiting = asyncio.ensure_future(frames.next(5))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            theirs.sendall(packed({"n": 2}))
            assert await frames.next(5) == ({"n": 2}, b"")

    asyncio.run(check())


def _n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptor_is_accepted_only_when_expected() -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            memory = os.memfd_create("given")
            before = _n_descriptors()
            socket.send_fds(theirs, [packed({"n": 1})], [memory])
            assert await frames.next(5)
            assert _n_descriptors() == before
            result = frames.accept_descriptors()
            socket.send_fds(theirs, [packed({"n": 2})], [memory])
            assert await frames.next(5) == ({"n": 2}, b"")
            socket.send_fds(theirs, [packed({"n": 3})], [memory])
            assert await frames.next(5)
            assert _n_descriptors() == before + 1
            assert os.fstat(result[0]).st_ino == os.fstat(memory).st_ino
            for descriptor in (memory, *result):
                os.close(descriptor)

    asyncio.run(check())


async def _last_of(frames: FrameConnection) -> None:
    while await frames.next(5):
        pass


@pytest.mark.parametrize(
    "sent",
    [
        HEADER.pack(MAX_HEAD + 1, 0),
        HEADER.pack(2, MAX_IMAGE_BYTES + 1),
        HEADER.pack(2, 0) + b"[]",
        HEADER.pack(2, 0) + b"{]",
        HEADER.pack(2, 0) + b"\xff\xff",
        HEADER.pack(50_000, 0) + b"[" * 50_000,
        packed({}) * 100,
        b"",
    ],
    ids=["head too long", "body too long", "no object", "no JSON", "no text", "too deep", "a flood", "the end"],
)
def test_malformed_frame_ends_the_connection(sent: bytes) -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
            for _ in range(2):
                with pytest.raises(PeerGone):
                    await _last_of(frames)

    asyncio.run(check())


def test_long_frame_is_sent_in_the_background() -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            frames.send({"cell": 1}, b"x" * 5_000_000)
            theirs.setblocking(True)
            assert await asyncio.to_thread(receive, theirs) == ({"cell": 1}, b"x" * 5_000_000)
            frames.send({"cell": 2}, b"x" * 5_000_000)

    asyncio.run(check())


def test_closed_peer_is_reported() -> None:
    async def check() -> None:
        async with opened() as (frames, theirs):
            theirs.close()
            frames.send({"cell": 1}, b"")
            with pytest.raises(PeerGone):
                await frames.next(5)

    asyncio.run(check())

"""The event loop of a worker: what it is busy with, and that it keeps nothing of what it has done."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from weakref import ref

import pytest

from workers.loop import Loop, Running

N = 50


@pytest.fixture
def loop() -> Iterator[Loop]:
    with closing(Loop()) as made:
        yield made


def test_nothing_is_kept_of_what_has_ended(loop: Loop) -> None:
    seen: list[ref[Any]] = []

    async def stage(number: int) -> int:
        seen.append(ref(asyncio.current_task()))
        async with asyncio.timeout(60):
            child = asyncio.create_task(asyncio.sleep(0))
            seen.append(ref(child))
            await child
            if number % 2:
                raise ValueError(number)
        return number

    for number in range(N):
        with suppress(ValueError):
            loop.run(stage(number), lambda running: seen.append(ref(running)))
    assert len(seen) == 3 * N
    # the loop itself holds what it has just called
    deadline = time.monotonic() + 60
    while any(known() for known in seen) and time.monotonic() < deadline:
        loop.run(asyncio.sleep(0))
        gc.collect()
    assert sum(known() is not None for known in seen) == 0


def test_what_a_child_is_busy_with_is_its_parents_work(loop: Loop) -> None:
    busy, go_on = threading.Event(), threading.Event()
    started: list[Running[Any]] = []

    async def child() -> None:
        busy.set()
        go_on.wait(60)

    async def stage() -> None:
        await asyncio.gather(child())

    with suppress(TimeoutError):
        loop.run(stage(), started.append, within_s=0)
    assert busy.wait(60)
    try:
        assert loop.at_work() is started[0]
    finally:
        go_on.set()
    loop.run(asyncio.sleep(0))
    assert loop.at_work() is None

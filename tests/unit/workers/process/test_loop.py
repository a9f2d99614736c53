"""The event loop of a worker: its current work, and that it keeps no references to finished work."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from weakref import ref

import pytest

from workers.process.loop import Loop, Running

N = 50


@pytest.fixture
def loop() -> Iterator[Loop]:
    with closing(Loop()) as made:
        yield made


def test_finished_work_is_not_referenced(loop: Loop) -> None:
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
    # the loop itself holds its last callback
    deadline = time.monotonic() + 60
    while any(known() for known in seen) and time.monotonic() < deadline:
        loop.run(asyncio.sleep(0))
        gc.collect()
    assert sum(known() is not None for known in seen) == 0


def test_child_task_has_the_work_of_its_parent(loop: Loop) -> None:
    busy, go_on = threading.Event(), threading.Event()
    started: list[Running[Any]] = []

    async def child() -> None:
        busy.set()
        go_on.wait(600)

    async def stage() -> None:
        await asyncio.gather(child())

    with suppress(TimeoutError):
        loop.run(stage(), started.append, within_s=0)
    assert busy.wait(600)
    try:
        assert loop.at_work() is started[0]
    finally:
        go_on.set()
    loop.run(asyncio.sleep(0))
    assert loop.at_work() is None


async def _leave(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exit_in_a_task_ends_neither_the_loop_nor_other_tasks(loop: Loop, error: BaseException) -> None:
    async def stage() -> str:
        left = asyncio.create_task(_leave(error))
        await asyncio.wait([left])
        assert left.exception() is error
        return "result"

    neighbour: list[Running[Any]] = []
    with suppress(TimeoutError):
        loop.run(asyncio.sleep(0.2, "neighbour"), neighbour.append, within_s=0)
    assert loop.run(stage(), within_s=60) == "result"
    with pytest.raises(type(error)):
        loop.run(_leave(error), within_s=60)
    assert neighbour[0].future.result(60) == "neighbour"


def test_only_the_owner_ends_the_loop(loop: Loop) -> None:
    async def stage() -> None:
        running = asyncio.get_running_loop()
        running.call_soon(sys.exit)
        running.stop()
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            running.close()

    for _ in range(20):
        loop.run(stage(), within_s=60)
    assert loop.run(asyncio.sleep(0, "result"), within_s=60) == "result"


def test_blocking_callback_is_its_rollouts_work(loop: Loop) -> None:
    busy, go_on = threading.Event(), threading.Event()
    started: list[Running[Any]] = []

    def block() -> None:
        busy.set()
        go_on.wait(600)

    async def stage() -> None:
        asyncio.get_running_loop().call_later(0.01, block)
        await asyncio.sleep(60)

    with suppress(TimeoutError):
        loop.run(stage(), started.append, within_s=0)
    assert busy.wait(600)
    try:
        assert loop.at_work() is started[0]
    finally:
        go_on.set()
        started[0].cancel()


def test_thread_has_the_work_of_its_stage(loop: Loop) -> None:
    busy, go_on = threading.Event(), threading.Event()
    started: list[Running[Any]] = []

    def block() -> None:
        busy.set()
        go_on.wait(600)

    async def stage() -> None:
        await asyncio.to_thread(block)

    before = time.monotonic()
    with suppress(TimeoutError):
        loop.run(stage(), started.append, within_s=0)
    assert busy.wait(600)
    assert loop.in_threads(time.monotonic()) == {started[0]}
    assert loop.in_threads(before) == set()
    go_on.set()
    started[0].future.result(60)
    assert loop.in_threads(time.monotonic()) == set()

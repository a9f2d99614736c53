"""The clock of a stage stops during waits for shared resources, and its deadlines follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.services.virtual_time import run
from workers.plugins.interfaces import AgentResult
from workers.sandboxes.images.content_store import made_in_place, made_once
from workers.stage_clock import StageClock, deadline, off_clock, stopped_s
from workers.stages.run_clock import in_time
from workers.testing.fakes import ScriptedPolicy, answering


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("waits", "total_s"),
    [
        # begin, end and maximum of each wait, in order of their beginning
        ([(0, 5, 100)], 5),
        ([(0, 5, 2)], 2),
        ([(0, 5, 100), (7, 9, 100)], 7),
        # one within the other, and two that overlap, count once
        ([(0, 9, 100), (2, 4, 100)], 9),
        ([(0, 5, 100), (3, 9, 100)], 9),
        # the longer one still counts when the other's maximum is reached
        ([(0, 9, 2), (1, 9, 5)], 6),
        ([(0, 9, 2), (4, 9, 2)], 4),
        ([(0, 9, 0)], 0),
    ],
)
def test_waits_are_counted_once_and_up_to_their_maximum(
    waits: list[tuple[float, float, float]], total_s: float
) -> None:
    now = Time()
    clock = StageClock(now)
    stacks = [ExitStack() for _ in waits]
    for instant in range(12):
        now.now = 100.0 + instant
        for stack, (begin, end, most_s) in zip(stacks, waits, strict=True):
            if instant == begin:
                stack.enter_context(clock.stopped(most_s))
            if instant == end:
                stack.close()
        assert clock.stopped_s == clock.stopped_s
    assert clock.stopped_s == total_s


def in_virtual_time(limit_s: float, waits_s: float, works_s: float, most_s: float = 1e9) -> float:
    """Wait, then work, under a deadline; return the time of the end. TimeoutError if the deadline passed."""

    async def stage() -> float:
        loop = asyncio.get_running_loop()
        with StageClock(loop.time).as_current():
            async with deadline(limit_s):
                with off_clock(most_s):
                    await asyncio.sleep(waits_s)
                await asyncio.sleep(works_s)
            return loop.time()

    return run(stage())


def test_waiting_is_not_on_the_clock_and_work_is() -> None:
    assert in_virtual_time(limit_s=10, waits_s=3000, works_s=9) == pytest.approx(3009)
    with pytest.raises(TimeoutError):
        in_virtual_time(limit_s=10, waits_s=3000, works_s=11)


def test_waiting_beyond_its_maximum_is_on_the_clock() -> None:
    assert in_virtual_time(limit_s=10, waits_s=28, works_s=1, most_s=20) == pytest.approx(29)
    with pytest.raises(TimeoutError):
        in_virtual_time(limit_s=10, waits_s=5000, works_s=0, most_s=20)


def test_nested_deadlines_stop_together() -> None:
    async def stage() -> float:
        async with deadline(20), deadline(10):
            with off_clock(1e9):
                await asyncio.sleep(500)
            await asyncio.sleep(9)
        async with deadline(10):
            # waits before the deadline began do not extend it
            with pytest.raises(TimeoutError):
                async with deadline(5):
                    await asyncio.sleep(6)
        return asyncio.get_running_loop().time()

    async def measured() -> float:
        with StageClock(asyncio.get_running_loop().time).as_current():
            return await stage()

    assert run(measured()) == pytest.approx(514, abs=0.1)


def test_wait_in_a_task_or_in_a_thread_counts_for_its_stage() -> None:
    async def stage() -> float:
        with StageClock().as_current() as clock:
            with off_clock(100):
                await asyncio.sleep(0.02)
            await asyncio.create_task(_waiting())
            await asyncio.to_thread(_block)
            return clock.stopped_s

    async def _waiting() -> None:
        with off_clock(100):
            await asyncio.sleep(0.02)

    def _block() -> None:
        with off_clock(0.02):
            asyncio.run(asyncio.sleep(0.05))

    assert asyncio.run(stage()) >= 0.06
    assert stopped_s() == 0.0


def test_deadline_is_cancelled_with_its_task() -> None:
    async def stage() -> None:
        async with deadline(0.01):
            pass
        await asyncio.sleep(0.1)
        async with deadline(None):
            await asyncio.sleep(0.01)

    asyncio.run(stage())


@pytest.mark.parametrize("making", [made_once, made_in_place])
def test_building_a_shared_resource_is_not_on_the_builders_clock(making: Callable[..., Path], tmp_path: Path) -> None:
    gate = asyncio.Event

    async def stage() -> tuple[float, float]:
        opened = gate()
        loop = asyncio.get_running_loop()

        def make(folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            asyncio.run_coroutine_threadsafe(opened.wait(), loop).result(30)

        async def one() -> float:
            with StageClock().as_current() as clock:
                async with deadline(1.0):
                    await asyncio.to_thread(partial(making, tmp_path / "shared", make))
                return clock.stopped_s

        both = [asyncio.create_task(one()) for _ in range(2)]
        # longer than the limit of each
        await asyncio.sleep(1.3)
        opened.set()
        first_s, second_s = await asyncio.gather(*both)
        return first_s, second_s

    assert min(asyncio.run(stage())) > 1.0


def test_agent_in_a_shared_wait_has_not_reached_its_deadline() -> None:
    async def stage(most_s: float) -> bool:
        async def agent() -> AgentResult:
            with off_clock(most_s):
                await asyncio.sleep(0.6)
            raise AssertionError("its result is not looked at")

        with StageClock().as_current():
            running = asyncio.ensure_future(agent())
            ended = await in_time(running, 0.3, ScriptedPolicy(answering("")))
            running.cancel()
            await asyncio.wait([running])
            return ended

    assert asyncio.run(stage(most_s=100))
    assert not asyncio.run(stage(most_s=0.0))


def test_deadline_within_a_shared_wait_has_its_own_clock() -> None:
    async def stage() -> float:
        loop = asyncio.get_running_loop()
        with StageClock(loop.time).as_current() as clock:
            with off_clock(1e9):
                with pytest.raises(TimeoutError):
                    async with deadline(5):
                        await asyncio.sleep(1000)
                with off_clock(1e9):
                    await asyncio.sleep(20)
            return clock.stopped_s

    assert run(stage()) == pytest.approx(25)

"""Results that viewers share: made once for many, again when they are old, never kept of a failure."""

from __future__ import annotations

import asyncio

import pytest

from farm.web.shared_results import SharedResults


class Maker:
    """Counts how often it was asked; may fail, and waits until it is let go on."""

    def __init__(self) -> None:
        self.n = 0
        self.fails = False
        self.may_go_on = asyncio.Event()

    async def __call__(self) -> int:
        self.n += 1
        await self.may_go_on.wait()
        if self.fails:
            raise ValueError("it broke")
        return self.n


def test_many_viewers_cost_one() -> None:
    async def look() -> None:
        made = Maker()
        shared: SharedResults[int] = SharedResults(60.0)
        viewers = [asyncio.create_task(shared.get("b", made)) for _ in range(50)]
        await asyncio.sleep(0)
        made.may_go_on.set()
        assert await asyncio.gather(*viewers) == [1] * 50
        assert await shared.get("other", made) == 2

    asyncio.run(look())


def test_an_old_result_is_made_again_and_a_final_one_later() -> None:
    async def look() -> None:
        made = Maker()
        made.may_go_on.set()
        shared: SharedResults[int] = SharedResults(0.0)
        assert await shared.get("b", made) == 1
        # it is kept for fifty times as long as it took, which is no time
        for _ in range(10_000):
            if await shared.get("b", made) != 1:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("it is kept")
        n = made.n
        final: SharedResults[int] = SharedResults(10.0)
        assert [await final.get("b", made, lambda _: True), await final.get("b", made, lambda _: True)] == [
            n + 1,
            n + 1,
        ]

    asyncio.run(look())


def test_a_failure_is_every_viewer_s_and_is_not_kept() -> None:
    async def look() -> None:
        made = Maker()
        made.may_go_on.set()
        made.fails = True
        shared: SharedResults[int] = SharedResults(60.0)
        results = await asyncio.gather(*(shared.get("b", made) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in results] == ["it broke"] * 3
        made.fails = False
        assert await shared.get("b", made) == 4

    asyncio.run(look())


def test_a_viewer_who_goes_away_costs_the_others_nothing() -> None:
    async def look() -> None:
        made = Maker()
        shared: SharedResults[int] = SharedResults(60.0)
        first, second = (asyncio.create_task(shared.get("b", made)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        made.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == 2

    asyncio.run(look())


def test_only_so_many_are_kept() -> None:
    async def look() -> None:
        made = Maker()
        made.may_go_on.set()
        shared: SharedResults[int] = SharedResults(60.0)
        for key in range(1000):
            await shared.get(key, made)
        assert len(shared._kept) <= 200
        assert shared._locks == {}

    asyncio.run(look())

"""Results that viewers share: computed once for many, again when they are old, and failures are not kept."""

from __future__ import annotations

import asyncio

import pytest

from farm.web.live_updates import SharedResults


class Maker:
    """Counts its calls; can fail, and waits until it is released."""

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


def test_concurrent_viewers_share_one_computation() -> None:
    async def main() -> None:
        made = Maker()
        shared: SharedResults[int] = SharedResults(60.0)
        viewers = [asyncio.create_task(shared.get("b", made)) for _ in range(50)]
        await asyncio.sleep(0)
        made.may_go_on.set()
        assert await asyncio.gather(*viewers) == [1] * 50
        assert await shared.get("other", made) == 2

    asyncio.run(main())


def test_old_result_is_computed_again_and_a_final_one_later() -> None:
    async def main() -> None:
        made = Maker()
        made.may_go_on.set()
        shared: SharedResults[int] = SharedResults(0.0)
        assert await shared.get("b", made) == 1
        # a result is kept for fifty times as long as it took, which is no time here
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

    asyncio.run(main())


def test_failure_is_raised_for_every_viewer_and_not_kept() -> None:
    async def main() -> None:
        made = Maker()
        made.may_go_on.set()
        made.fails = True
        shared: SharedResults[int] = SharedResults(60.0)
        results = await asyncio.gather(*(shared.get("b", made) for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in results] == ["it broke"] * 3
        made.fails = False
        assert await shared.get("b", made) == 4

    asyncio.run(main())


def test_viewer_that_disconnects_does_not_affect_the_others() -> None:
    async def main() -> None:
        made = Maker()
        shared: SharedResults[int] = SharedResults(60.0)
        first, second = (asyncio.create_task(shared.get("b", made)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        made.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == 2

    asyncio.run(main())


def test_number_of_kept_results_is_limited() -> None:
    async def main() -> None:
        made = Maker()
        made.may_go_on.set()
        shared: SharedResults[int] = SharedResults(60.0)
        for key in range(1000):
            await shared.get(key, made)
        assert len(shared._kept) <= 200
        assert shared._locks == {}

    asyncio.run(main())

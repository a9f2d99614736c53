"""Calls for single samples become groups: joined by key, split by time and size, and failing together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from farm.adapters.single_row import RewardsSoFar, SampleWindow


class GroupRunner:
    """Runs groups, and remembers them."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def run_group(self, samples: Sequence[str]) -> list[str]:
        self.groups.append(list(samples))
        if "bad" in samples:
            raise ValueError("the run failed")
        return [sample.upper() for sample in samples]


def test_calls_with_one_key_form_a_group_and_get_their_own_results() -> None:
    runner = GroupRunner()

    async def run() -> list[str]:
        window = SampleWindow(runner.run_group)
        return await asyncio.gather(*(window.result(name[0], name) for name in ("a1", "b1", "a2", "b2")))

    assert asyncio.run(run()) == ["A1", "B1", "A2", "B2"]
    assert sorted(runner.groups) == [["a1", "a2"], ["b1", "b2"]]


def test_full_group_takes_no_more_calls() -> None:
    runner = GroupRunner()

    async def run() -> list[str]:
        window = SampleWindow(runner.run_group, most=2)
        return await asyncio.gather(*(window.result("a", f"a{number}") for number in range(5)))

    assert asyncio.run(run()) == ["A0", "A1", "A2", "A3", "A4"]
    assert sorted(map(len, runner.groups)) == [1, 2, 2]


def test_failure_reaches_every_call_of_its_group_only() -> None:
    runner = GroupRunner()

    async def run() -> list[object]:
        window = SampleWindow(runner.run_group)
        calls = (window.result("a", "bad"), window.result("a", "good"), window.result("b", "fine"))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, second, third = asyncio.run(run())
    assert isinstance(first, ValueError)
    assert isinstance(second, ValueError)
    assert third == "FINE"


def test_cancelled_call_leaves_its_siblings_running() -> None:
    async def run() -> str:
        window = SampleWindow(GroupRunner().run_group)
        first = asyncio.create_task(window.result("a", "one"))
        second = asyncio.create_task(window.result("a", "two"))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(run()) == "TWO"


def test_entirely_broken_group_gets_the_mean_reward_so_far_for_a_limited_time() -> None:
    rewards = RewardsSoFar()
    assert rewards.fallback() == 0.0
    for _ in range(16):
        rewards.take([])
    assert rewards.fallback() is None
    rewards.take([1.0, 0.0])
    rewards.take([0.5])
    assert rewards.fallback() == 0.5

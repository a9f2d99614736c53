"""A limited number and size of calls is remembered: each while it runs, and the last ones after their end."""

from __future__ import annotations

import asyncio

import pytest

from farm.records.lending.sandbox_calls import CommandResult, ToolResult
from workers.lending import lent_sandbox
from workers.lending.lent_sandbox import MAX_REMEMBERED, CallMemory


async def gives(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result


async def ended(memory: CallMemory, call_id: str, result: object = None) -> None:
    task = asyncio.ensure_future(gives(result))
    memory.add(call_id, task)
    await asyncio.wait([task])


@pytest.mark.parametrize("n", [1, MAX_REMEMBERED // 2, MAX_REMEMBERED - 1, MAX_REMEMBERED, MAX_REMEMBERED + 1, 500])
def test_last_calls_are_remembered(n: int) -> None:
    async def remembered() -> list[int]:
        memory = CallMemory()
        for number in range(n):
            await ended(memory, str(number), ValueError() if number % 2 else None)
        return [number for number in range(n) if memory.get(str(number)) is not None]

    assert asyncio.run(remembered()) == list(range(max(0, n - MAX_REMEMBERED), n))


def test_running_call_is_never_forgotten() -> None:
    async def check() -> None:
        memory, may_end = CallMemory(), asyncio.Event()
        goes_on = asyncio.ensure_future(may_end.wait())
        memory.add("goes on", goes_on)
        for number in range(2 * MAX_REMEMBERED):
            await ended(memory, str(number))
        memory.forget(["goes on", "none"])
        assert memory.get("goes on") is goes_on
        may_end.set()
        await goes_on
        await ended(memory, "one more")
        assert memory.get("goes on") is goes_on, "it has just ended"
        memory.forget(["goes on"])
        assert memory.get("goes on") is None

    asyncio.run(check())


def test_large_results_are_forgotten_sooner_and_the_last_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_sandbox, "MAX_BYTES", 1000)

    async def check() -> None:
        memory = CallMemory()
        await ended(memory, "a", CommandResult(0, "x" * 300, "y" * 300))
        await ended(memory, "b", ToolResult("", artefacts={"p": ["image/png", "z" * 300]}))
        assert memory.get("a") is not None
        await ended(memory, "c", CommandResult(0, "x" * 300, ""))
        assert memory.get("a") is None
        assert memory.get("b") is not None
        await ended(memory, "d", CommandResult(0, "x" * 5000, ""))
        assert [memory.get(each) is not None for each in "abcd"] == [False, False, False, True]

    asyncio.run(check())

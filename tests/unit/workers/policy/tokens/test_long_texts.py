"""Long texts of one rollout: encoded one at a time, and none for a cancelled caller."""

from __future__ import annotations

import asyncio
import threading

import pytest

from workers.policy.tokens.long_texts import LongTexts

_DEADLINE_S = 60.0


def test_cancelled_caller_waits_no_longer() -> None:
    async def main() -> None:
        begun, free = threading.Event(), threading.Event()
        long_texts = LongTexts()

        def encode() -> str:
            begun.set()
            free.wait(_DEADLINE_S)
            return "ids"

        async with asyncio.timeout(_DEADLINE_S):
            given_up = asyncio.create_task(long_texts.run(encode))
            await asyncio.to_thread(begun.wait)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            ran: list[str] = []
            never = asyncio.create_task(long_texts.run(lambda: ran.append("never")))
            following = asyncio.create_task(long_texts.run(lambda: ran.append("following")))
            await asyncio.sleep(0)
            never.cancel()
            await asyncio.wait([never])
            assert not following.done()
            free.set()
            await following
        assert ran == ["following"]

    asyncio.run(main())


def test_error_is_raised_for_its_caller_and_the_next_text_is_encoded() -> None:
    async def main() -> None:
        long_texts = LongTexts()
        with pytest.raises(ZeroDivisionError):
            await long_texts.run(lambda: 1 / 0)
        assert await long_texts.run(lambda: 1) == 1

    asyncio.run(main())

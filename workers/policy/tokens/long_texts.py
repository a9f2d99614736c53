"""Work on the long texts of one rollout, in threads, as all rollouts of a worker share its event loop.

The tokenizer cannot be interrupted. So a text whose caller has gone is encoded to its end, which is near, as the length
of a request is limited; only the next long text of the same rollout waits for it. A rollout keeps one thread busy at
most, however many of its calls are given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class LongTexts:
    """One thread's worth of work at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, from a thread; a caller that is cancelled waits no longer."""
        await self._turn.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(partial(_release, self._turn))
        return await asyncio.shield(task)


def _release(turn: asyncio.Lock, task: asyncio.Future[T]) -> None:
    turn.release()
    if not task.cancelled():
        # of a caller that has gone nobody else would ask for it
        task.exception()

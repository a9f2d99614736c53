"""Work on the long texts of one rollout, in threads, as all rollouts of a worker share its event loop.

The tokenizer cannot be interrupted. So an abandoned text is encoded to its end, which takes bounded time as requests
have a maximum length; only the next long text of the same rollout waits for it. A rollout uses one thread at most,
however many of its calls are abandoned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class LongTexts:
    """Runs one piece of work at a time in a thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, from a thread; a cancelled caller stops waiting."""
        await self._turn.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(partial(_release, self._turn))
        return await asyncio.shield(task)


def _release(turn: asyncio.Lock, task: asyncio.Future[T]) -> None:
    turn.release()
    if not task.cancelled():
        # Nobody else retrieves the exception of an abandoned text.
        task.exception()

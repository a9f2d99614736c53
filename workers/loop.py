"""The one event loop of a worker process, and how a Celery thread waits on it.

A thread is only a parking slot: it starts one coroutine and sleeps until that has ended, its clean-up included.
Hundreds of rollouts cost hundreds of sleeping threads, and a cancel reaches the coroutine at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """An asyncio event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], started: Callable[[Callable[[], None]], None]) -> T:
        """Run a coroutine to its end and wait. `started` is given a function that cancels it, from any thread.

        Raises what the coroutine raises; asyncio.CancelledError if it was cancelled.
        """
        future: Future[T] = Future()

        def begin() -> None:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(lambda done: _copy(done, future))
            started(lambda: self._call(task.cancel))

        self._call(begin)
        return future.result()

    def _call(self, action: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        self._call(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _copy(task: asyncio.Task[T], future: Future[T]) -> None:
    if task.cancelled():
        future.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())

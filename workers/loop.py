"""The one event loop of a worker process, and how a Celery thread waits on it.

A thread is only a parking slot: it starts one coroutine and sleeps until that has ended, its clean-up included.
Hundreds of rollouts cost hundreds of sleeping threads, and a cancel reaches the coroutine at once.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_N_THREADS = 32
"""For what blocks. Some of it may hang for good, as a file system can, and must not take all others along."""


class Loop:
    """An asyncio event loop in a thread of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_N_THREADS, "blocking")
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_Task)
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        started: Callable[[Running[T]], None] | None = None,
        within_s: float | None = None,
    ) -> T:
        """Run a coroutine to its end and wait, if need be not longer than `within_s`. `started` is given what stops it.

        Raises what the coroutine raises; asyncio.CancelledError if it was cancelled; TimeoutError; and what it was
        abandoned with.
        """
        running: Running[T] = Running(self.call)
        self.call(lambda: running.begin(self._loop, coroutine))
        if started is not None:
            started(running)
        return running.future.result(within_s)

    def call(self, action: Callable[[], Any]) -> None:
        """Have the loop call something soon. From any thread."""
        self._loop.call_soon_threadsafe(action)

    def block(self, action: Callable[[], T]) -> Future[T]:
        """Have something called in one of the threads for what blocks. From any thread."""
        return self._threads.submit(action)

    def at_work(self) -> Running[Any] | None:
        """What the loop is busy with at this moment, if that belongs to what it was asked to `run`."""
        task = asyncio.current_task(self._loop)
        return task.work if isinstance(task, _Task) else None

    def stack(self) -> list[str]:
        """Where the loop's thread is at this moment, innermost last; from any thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return traceback.format_stack(frame) if frame is not None else []

    def close(self) -> None:
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Running(Generic[T]):
    """A coroutine on the loop and, as `future`, the thread that waits for it."""

    def __init__(self, call: Callable[[Callable[[], Any]], None]) -> None:
        self.future: Future[T] = Future()
        self.ended = False
        """Whether the coroutine has ended; who waited may have been sent away before."""
        self._call = call
        self._task: asyncio.Task[T] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        """On the loop."""
        _WORK.set(self)
        self._task = loop.create_task(coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel it, from any thread; who waits is told when it has ended."""
        self._call(lambda: self._task is not None and self._task.cancel())

    def abandon(self, error: BaseException) -> None:
        """Let nobody wait for it any longer, from any thread: who does, gets `error`. It may go on, or hang on."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def _end(self, task: asyncio.Task[T]) -> None:
        self.ended = True
        # they know each other
        self._task = None
        with suppress(InvalidStateError):
            if task.cancelled():
                self.future.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(task.result())


class _Task(asyncio.Task[T]):
    """A task that knows to what it belongs, as its children do.

    In itself and in no table beside it: what has failed leads to its task by its traceback, and would stay for ever.
    """

    __slots__ = ("work",)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **more: Any
    ) -> None:
        super().__init__(coroutine, loop=loop, **more)
        self.work: Running[Any] | None = _WORK.get()


_WORK: ContextVar[Running[Any] | None] = ContextVar("work", default=None)

"""The single event loop of a worker process, and the way a Celery thread waits on it.

A thread only starts one coroutine and sleeps until it has ended, including its clean-up. Hundreds of rollouts cost
hundreds of sleeping threads, and a cancel reaches the coroutine immediately.

Only `close` ends the loop. A `SystemExit` or `KeyboardInterrupt` from a task or a callback, and a call of `stop` from
elsewhere, end only the current run of the loop, which is then continued with all its tasks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, TypeVar

from farm.thread_names import name_thread

T = TypeVar("T")

log = logging.getLogger(__name__)

_N_THREADS = 32
"""For blocking calls. Some of them may hang for ever, e.g. in a file system, and must not block all others."""


class Loop:
    """An asyncio event loop in its own thread."""

    def __init__(self) -> None:
        self._threads = _Threads(_N_THREADS, "blocking")
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_Task)
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        name_thread(self._thread.name)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException as error:
                log.error("%s escaped from a task or callback; the event loop continues", type(error).__name__)
            else:
                if not self._closing:
                    log.error("A plug-in stopped the event loop; restarting it")

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        started: Callable[[Running[T]], None] | None = None,
        within_s: float | None = None,
    ) -> T:
        """Run a coroutine and wait for its end, at most `within_s`. `started` receives the object that can stop it.

        Raises the coroutine's error; asyncio.CancelledError if it was cancelled; TimeoutError; and the error with which
        it was abandoned.
        """
        running: Running[T] = Running(self.call)
        self.call(lambda: running.begin(self._loop, coroutine))
        if started is not None:
            started(running)
        return running.future.result(within_s)

    def call(self, action: Callable[[], Any]) -> None:
        """Schedule a call on the loop, from any thread."""
        self._loop.call_soon_threadsafe(action)

    def block(self, action: Callable[[], T]) -> Future[T]:
        """Run a blocking call in one of the loop's threads, from any thread."""
        return self._threads.submit(action)

    def at_work(self) -> Running[Any] | None:
        """Return the work that the loop is executing at this moment; None if there is none."""
        task = asyncio.current_task(self._loop)
        if isinstance(task, _Task):
            return task.work
        # in a callback, which has the context of its caller
        for frame in self._frames():
            handle = frame.f_locals.get("self")
            if isinstance(handle, asyncio.Handle):
                return handle._context.get(_WORK)  # type: ignore[attr-defined,no-any-return]
        return None

    def in_threads(self, since: float) -> set[Running[Any]]:
        """Return the work that has occupied a thread for blocking calls since a moment of the monotonic clock."""
        return {work for work, began_at in self._threads.at_work() if work is not None and began_at <= since}

    def stack(self) -> list[str]:
        """Return the current stack of the loop's thread, innermost frame last; from any thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return traceback.format_stack(frame) if frame is not None else []

    def _frames(self) -> Iterator[FrameType]:
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def close(self) -> None:
        self._closing = True
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Running(Generic[T]):
    """A coroutine on the loop; a thread waits for it through `future`."""

    def __init__(self, call: Callable[[Callable[[], Any]], None]) -> None:
        self.future: Future[T] = Future()
        self.ended = False
        """True if the coroutine has ended; its caller may have stopped waiting before."""
        self._call = call
        self._task: asyncio.Task[T] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        """Start the coroutine. Call it on the loop."""
        _WORK.set(self)
        self._task = loop.create_task(coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel it, from any thread; its caller continues when it has ended."""
        self._call(lambda: self._task is not None and self._task.cancel())

    def abandon(self, error: BaseException) -> None:
        """Raise `error` in its caller, from any thread. The coroutine itself may continue or hang."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def _end(self, task: asyncio.Task[T]) -> None:
        self.ended = True
        # the two refer to each other
        self._task = None
        with suppress(InvalidStateError):
            if task.cancelled():
                self.future.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(task.result())


class _Threads(ThreadPoolExecutor):
    """The threads for blocking calls, with the work that occupies each and since when."""

    def __init__(self, n_threads: int, name: str) -> None:
        super().__init__(n_threads, name)
        self._busy: dict[int, tuple[Running[Any] | None, float]] = {}

    def submit(self, call: Callable[..., T], /, *values: Any, **named: Any) -> Future[T]:
        return super().submit(self._called, _WORK.get(), call, values, named)

    def _called(self, work: Running[Any] | None, call: Callable[..., T], values: Any, named: Any) -> T:
        thread = threading.get_ident()
        self._busy[thread] = work, time.monotonic()
        try:
            return call(*values, **named)
        finally:
            del self._busy[thread]

    def at_work(self) -> list[tuple[Running[Any] | None, float]]:
        return list(self._busy.copy().values())


class _Task(asyncio.Task[T]):
    """A task with the work that it belongs to, inherited by child tasks.

    It is an attribute, not an entry in a table: an error's traceback refers to its task, which would stay in a table
    for ever.
    """

    __slots__ = ("work",)

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **more: Any
    ) -> None:
        super().__init__(coroutine, loop=loop, **more)
        self.work: Running[Any] | None = _WORK.get()


_WORK: ContextVar[Running[Any] | None] = ContextVar("work", default=None)

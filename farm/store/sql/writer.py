"""A thread that groups writes: all that wait while one transaction runs go into the next one together.

A write that the database refuses is run again by itself, so that it does not fail others. If the database is
unavailable, a write is retried until its caller no longer waits for it.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection

from farm.store.sql.database_errors import Outage, RetryableFailure, retryable_failure, unavailable, waited_for_lock
from farm.thread_names import name_thread

T = TypeVar("T")
Work: TypeAlias = Callable[[Connection], T]

log = logging.getLogger(__name__)

_GROUP = 128
CLOSE_S = 5.0
"""Time for writes that wait for an unavailable database when a store is closed; all pending ones get `_END_S`."""
_END_S = 30.0
_PAUSE_S = (0.02, 1.0)
_N_SINGLE_TRIES = 10
"""The maximum number of tries of a write that breaks its connection while the database answers others."""


@dataclass(slots=True, eq=False)
class PendingWrite:
    """A write and its waiting caller's future; `rollout_id` is the rollout that it changes, if it is one.

    `batch_id` is the batch of a rollout that it may end, which then takes a number of that batch.
    """

    work: Work[Any]
    future: Future[Any]
    deadline: float
    batch_id: str = ""
    rollout_id: str = ""
    error: BaseException | None = None
    n_single_tries: int = 0

    def is_wanted(self, closes_at: float) -> bool:
        """Return whether to try it (again): not if its caller cancelled it, or if it took too long and fails here."""
        if self.future.cancelled():
            self.future.set_running_or_notify_cancel()
            return False
        if self.error is not None and time.monotonic() > min(self.deadline, closes_at):
            self.fail(unavailable(self.error))
            return False
        return True

    def succeed(self, result: Any) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Writer:
    """Writes in groups: `transact` runs a group in one transaction, `answers` tells if the database answers at all."""

    def __init__(
        self, name: str, transact: Callable[[Sequence[PendingWrite]], list[Any]], answers: Callable[[], bool]
    ) -> None:
        self._name = name
        self._transact = transact
        self._answers = answers
        self._waiting: queue.SimpleQueue[PendingWrite | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closes_at = math.inf
        self._outage = Outage("writes")

    def put(self, write: PendingWrite) -> None:
        """Queue a write for the next group."""
        if self._thread is None:
            self._start()
        self._waiting.put(write)

    def close(self) -> None:
        """Write pending writes. Those that an unavailable database delays are dropped."""
        self._closes_at = time.monotonic() + CLOSE_S
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_END_S)
            self._thread = None
        self._closes_at = math.inf

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_groups, name=self._name, daemon=True)
                self._thread.start()

    def _write_groups(self) -> None:
        name_thread(self._name)
        left: list[PendingWrite] = []
        waits = pauses()
        ended = False
        while not ended or left:
            group, ended = self._gathered(left, ended)
            left = self._tried([each for each in group if each.is_wanted(self._closes_at)])
            if left:
                time.sleep(next(waits))
            else:
                waits = pauses()

    def _gathered(self, left: list[PendingWrite], ended: bool) -> tuple[list[PendingWrite], bool]:
        """Return the next group of writes, those `left` first, and whether it is the last."""
        group = list(left)
        while len(group) < _GROUP and not ended:
            try:
                item = self._waiting.get(block=not group)
            except queue.Empty:
                break
            if item is None:
                ended = True
            else:
                group.append(item)
        return group, ended

    def _tried(self, group: list[PendingWrite]) -> list[PendingWrite]:
        """Write a group; return the writes to retry later, because the database is unavailable."""
        if not group:
            return []
        try:
            results = self._transact(group)
        except BaseException as error:
            return self._failed(group, error)
        self._outage.over()
        for each, result in zip(group, results, strict=True):
            each.succeed(result)
        return []

    def _failed(self, group: list[PendingWrite], error: BaseException) -> list[PendingWrite]:
        trouble = retryable_failure(error)
        if trouble is RetryableFailure.AWAY or (trouble is RetryableFailure.BROKEN and not self._answers()):
            self._outage.noticed(error)
            for each in group:
                each.error = error
            return group
        if len(group) > 1:
            log.debug("Group of %d writes failed; retrying them one by one", len(group), exc_info=error)
            return self._tried_singly(group)
        one = group[0]
        one.error = error
        # the server soon ends the session that holds that lock
        one.n_single_tries += 0 if waited_for_lock(error) else 1
        if trouble is not None and one.n_single_tries < _N_SINGLE_TRIES:
            return group
        one.fail(error if trouble is None else unavailable(error))
        return []

    def _tried_singly(self, group: list[PendingWrite]) -> list[PendingWrite]:
        left: list[PendingWrite] = []
        for n, each in enumerate(group):
            left += self._tried([each])
            if self._outage.lasts:
                return left + group[n + 1 :]
        return left


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between tries: they grow, and are random, so that not all processes return at once."""
    pause_s, longest_s = _PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause_s = min(pause_s * 2, longest_s)

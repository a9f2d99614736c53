"""A consumer's stream of a batch to its end, page by page, for all kinds of clients."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from farm.errors import InvalidRequest
from farm.records.rollout import Rollout

log = logging.getLogger(__name__)

CONSUMER = "trainer"
"""The default name of the consumer that streams and acknowledges."""
MAX_WAIT_S = 20.0
"""Seconds that one request may wait for its answer; for longer waits a client repeats it."""
_WARN_S = 30.0
"""Seconds between two warnings about a stream without progress, if the reason is known."""
CONSUMER_NAME = r"^[A-Za-z0-9._:-]{1,64}$"


@dataclass(frozen=True, slots=True)
class Page:
    """Rollouts, or whole groups, that ended after a cursor, in that order, with their training rows.

    `is_last` if all rollouts of the batch had ended when the page was made.
    """

    rollouts: tuple[Rollout, ...]
    is_last: bool

    @property
    def settled(self) -> bool:
        """True if waiting would change nothing."""
        return bool(self.rollouts) or self.is_last


class BatchWatch(Protocol):
    """A batch that is polled; each poll waits up to `wait_s` for results."""

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        """Return a page of rollouts that ended after a cursor."""

    def has_open(self, wait_s: float) -> bool:
        """Return whether some rollout has not ended yet."""


def pages(
    watch: BatchWatch,
    batch_id: str,
    cursor: int,
    whole_groups: bool,
    timeout_s: float | None,
    warnings: Callable[[], Iterable[str]],
) -> Iterator[Page]:
    """Yield pages of a batch from a cursor to its end; `warnings` are logged while nothing ends.

    Raises TimeoutError when nothing ended for `timeout_s`.
    """
    since = warned_at = time.monotonic()
    while True:
        page = watch.page(cursor, whole_groups, _wait_s(since, timeout_s))
        if page.rollouts:
            cursor = max(rollout.cursor for rollout in page.rollouts)
            yield page
            since = time.monotonic()
        elif page.is_last:
            return
        elif timeout_s is not None and time.monotonic() - since >= timeout_s:
            raise TimeoutError(f"batch {batch_id}: nothing ended for {timeout_s:g} s (cursor {cursor})")
        elif time.monotonic() - max(since, warned_at) >= _WARN_S:
            warned_at = time.monotonic()
            for warning in warnings():
                log.warning("Batch %s makes no progress: %s", batch_id, warning)


def all_ended(watch: BatchWatch, timeout_s: float | None) -> bool:
    """Wait until all rollouts of a batch have ended; return False after `timeout_s`."""
    since = time.monotonic()
    while watch.has_open(_wait_s(since, timeout_s)):
        if timeout_s is not None and time.monotonic() - since >= timeout_s:
            return False
    return True


def check_consumer(consumer: str) -> None:
    """Raise InvalidRequest for an invalid consumer name."""
    if not re.fullmatch(CONSUMER_NAME, consumer):
        raise InvalidRequest("must have 1 to 64 of A-Z, a-z, 0-9, '.', '_', ':' and '-'", field="consumer")


def _wait_s(since: float, timeout_s: float | None) -> float:
    left_s = MAX_WAIT_S if timeout_s is None else timeout_s - (time.monotonic() - since)
    return max(0.0, min(left_s, MAX_WAIT_S))

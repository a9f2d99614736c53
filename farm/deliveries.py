"""How a consumer follows a batch to its end: the same for every way to reach a farm, but for how it is asked."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from farm.errors import InvalidRequest
from farm.rollout import BatchStatus, Group, Rollout
from farm.target import Target

CONSUMER = "trainer"
"""Who streams and acknowledges, unless it says otherwise."""
LONGEST_WAIT_S = 20.0
"""What one question may wait for its answer; whoever wants to wait longer asks again."""
_CONSUMER = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Page:
    """Rollouts that ended after a cursor, in that order, or whole groups of them, with their training rows.

    `is_last` if all rollouts of the batch had ended when it was made.
    """

    rollouts: tuple[Rollout, ...]
    is_last: bool

    @property
    def settled(self) -> bool:
        """Whether to wait would be in vain."""
        return bool(self.rollouts) or self.is_last


class Watch(Protocol):
    """One batch, looked at again and again. What there is not yet is waited for, `wait_s` at most."""

    def page(self, cursor: int, whole_groups: bool, wait_s: float) -> Page:
        """What ended after a cursor."""

    def has_open(self, wait_s: float) -> bool:
        """Whether some rollout has still not ended."""


class Deliveries(ABC):
    """The verbs that wait for rollouts, and those that note what a consumer has dealt with."""

    @abstractmethod
    def status(self, batch_id: str) -> BatchStatus:
        """A batch in numbers. Raises NotFound."""

    @abstractmethod
    def acknowledged(self, batch_id: str, consumer: str = CONSUMER) -> int:
        """The cursor after which a consumer's streams go on; 0 if it has acknowledged nothing. Raises NotFound."""

    @abstractmethod
    def acknowledge_up_to(self, batch_id: str, cursor: int, consumer: str) -> int:
        """Note that a consumer has dealt with all that ended up to a cursor; how far it has come.

        It never moves back. Raises NotFound, and InvalidRequest for a cursor that was never given out.
        """

    @abstractmethod
    def _watch(self, batch_id: str) -> AbstractContextManager[Watch]:
        """Look at a batch for as long as the block lasts."""

    def acknowledge(self, given: Rollout | Group, consumer: str = CONSUMER) -> int:
        """Note that a consumer has dealt with this and all that its stream gave before; how far it has come.

        Harmless when repeated, and when what was acknowledged later came first: it never moves back. Raises NotFound,
        and InvalidRequest for what has not ended.
        """
        if not given.cursor:
            raise InvalidRequest("it has not ended, so nobody was given it", field="rollout")
        return self.acknowledge_up_to(Target.of(given.group_id).batch_id, given.cursor, consumer)

    def stream(
        self, batch_id: str, cursor: int | None = None, timeout_s: float | None = None, consumer: str = CONSUMER
    ) -> Iterator[Rollout]:
        """The rollouts of a batch as they end, with training rows, until all have.

        They begin after a cursor (0: with the first that ended), without one after what the consumer has acknowledged.
        One that is scored again ends again, and comes again. Raises NotFound; TimeoutError when none ended for
        `timeout_s`.
        """
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=False):
            yield from page.rollouts

    def stream_groups(
        self, batch_id: str, cursor: int | None = None, timeout_s: float | None = None, consumer: str = CONSUMER
    ) -> Iterator[Group]:
        """As `stream`, in whole groups as their last rollout ends."""
        for page in self._pages(batch_id, cursor, timeout_s, consumer, whole_groups=True):
            for group_index in dict.fromkeys(rollout.group_index for rollout in page.rollouts):
                members = tuple(rollout for rollout in page.rollouts if rollout.group_index == group_index)
                yield Group(members[0].group_id, members)

    def _pages(
        self, batch_id: str, cursor: int | None, timeout_s: float | None, consumer: str, whole_groups: bool
    ) -> Iterator[Page]:
        acknowledged = self.acknowledged(batch_id, consumer)
        if cursor is None:
            cursor = acknowledged
        since = time.monotonic()
        with self._watch(batch_id) as watch:
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

    def wait(self, batch_id: str, timeout_s: float | None = None) -> BatchStatus:
        """Wait until all rollouts of a batch have ended. Raises NotFound, TimeoutError."""
        since = time.monotonic()
        with self._watch(batch_id) as watch:
            status = self.status(batch_id)
            while watch.has_open(_wait_s(since, timeout_s)):
                if timeout_s is not None and time.monotonic() - since >= timeout_s:
                    status = self.status(batch_id)
                    raise TimeoutError(
                        f"batch {batch_id}: {status.n_finished} of {status.n_rollouts} ended in {timeout_s:g} s"
                    )
            return status if status.done else self.status(batch_id)


def check_consumer(consumer: str) -> None:
    """Raises InvalidRequest for what is no consumer's name."""
    if not _CONSUMER.fullmatch(consumer):
        raise InvalidRequest("1 to 64 of A-Z, a-z, 0-9, '.', '_', ':' and '-'", field="consumer")


def _wait_s(since: float, timeout_s: float | None) -> float:
    left_s = LONGEST_WAIT_S if timeout_s is None else timeout_s - (time.monotonic() - since)
    return max(0.0, min(left_s, LONGEST_WAIT_S))

"""Detection of jumps of the store's clock, by comparison with this process's own clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection, select

from farm.store.sql.clock import db_now

log = logging.getLogger(__name__)

_MIN_S = 2.0
"""Smaller jumps change nothing that matters."""


def store_time(connection: Connection) -> float:
    """Return the store's clock."""
    return float(connection.execute(select(db_now())).scalar_one())


class Timekeeper:
    """Compares the store's clock with a clock of this process that never jumps."""

    def __init__(self, own_time: Callable[[], float] = time.monotonic) -> None:
        self._own_time = own_time
        self._last: tuple[float, float, float] | None = None

    def read(self, ask: Callable[[], float]) -> tuple[float, float]:
        """Return the store's time, and the seconds by which it jumped since the last reading, 0 if it did not.

        A slow answer is no jump: the store's time lies between the query and the answer.
        """
        requested_at = self._own_time()
        now = ask()
        answered_at = self._own_time()
        last, self._last = self._last, (requested_at, answered_at, now)
        if last is None:
            return now, 0.0
        passed_s = now - last[2]
        at_least_s, at_most_s = requested_at - last[1], answered_at - last[0]
        ahead_s, behind_s = passed_s - at_most_s, at_least_s - passed_s
        if max(ahead_s, behind_s) < _MIN_S:
            return now, 0.0
        jump_s = ahead_s if ahead_s > 0 else -behind_s
        log.error(
            "ALARM the store's clock jumped %s by %.0f s: expired leases are ignored until workers had time to renew; "
            "check the clock of the database's machine",
            *("ahead" if jump_s > 0 else "back", abs(jump_s)),
        )
        return now, jump_s

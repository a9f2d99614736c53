"""The database's clock, so that leases do not depend on how well the nodes' clocks agree; and its jumps.

A time in a row is compared with the clock only by the functions here. Each time is within a known distance of the
moment when it was written. One that is further away was written before the clock jumped: a pause or a lease that could
not end so late counts as over, and a heartbeat from so far ahead counts as none. So a jump delays nothing for longer
than the intended pause. A jump ahead would end all leases at once: the dispatcher compares the clock with its own
(`Timekeeper`), and lets all workers renew before it takes a claim away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, case, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction

log = logging.getLogger(__name__)

_MIN_S = 2.0
"""Smaller jumps change nothing that matters."""


class db_now(GenericFunction[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch, UTC, at the moment the statement runs."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite(element: db_now, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql(element: db_now, compiler: Any, **kw: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) AS double precision)"


def due(instant: ColumnElement[Any], longest_s: float, now: Any = None) -> ColumnElement[bool]:
    """Return the condition that a time, written at most `longest_s` ahead, has come; NULL if there is none."""
    at = db_now() if now is None else now
    return (instant <= at) | (instant > at + longest_s)


def age_of(instant: ColumnElement[Any]) -> ColumnElement[float]:
    """Return the seconds since a heartbeat; one from the future is as old as it is ahead."""
    return func.abs(db_now() - instant)


def left_until(instant: ColumnElement[Any], longest_s: float) -> ColumnElement[Any]:
    """Return the seconds until a time that was at most `longest_s` ahead when it was written; null once it is `due`."""
    return case((due(instant, longest_s), None), else_=instant - db_now())


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

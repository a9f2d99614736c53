"""The database's clock, so that leases do not depend on how well the nodes' clocks agree; and its jumps.

A time in a row is compared with the clock only by these two functions. Each time is within a known distance of the
moment when it was written. One that is further away was written before the clock jumped: a pause or a lease that could
not end so late counts as over, and a heartbeat from so far ahead counts as none. So a jump delays nothing for longer
than the intended pause. A jump ahead would end all leases at once: the dispatcher compares the clock with its own
(`clock_jumps`), and lets all workers renew before it takes a claim away.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Double, case, func
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


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

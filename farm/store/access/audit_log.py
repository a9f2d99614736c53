"""The audit log: each order of a caller, written in the transaction that executes it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, delete, exists, func, insert, literal, select

from farm.callers import LoggedOrder, current_caller
from farm.store.database import Work
from farm.store.sql.clock import db_now
from farm.store.sql.sanitize import plain
from farm.store.sql.schema import AuditLogRow

T = TypeVar("T")
orders = AuditLogRow.__table__

MOST = 200_000
"""The number of orders that are kept, the newest ones."""
_PRUNE_EVERY = 1000
_CHARS = 500


def logged(
    work: Work[T],
    verb: str,
    target: str | Callable[[T], str],
    details: str | Callable[[T], str] = "",
    done: Callable[[T], bool] = lambda result: True,
) -> Work[T]:
    """Return work that also logs its order for the present caller, once it is `done`.

    Work may run twice, as the answer to a commit may be lost; the order is logged once.
    """
    by, mark = current_caller().name, secrets.token_hex(8)

    def run(connection: Connection) -> T:
        value = work(connection)
        if done(value):
            texts = [plain(each(value) if callable(each) else each, _CHARS) for each in (target, details)]
            _write(connection, mark, [by, verb, *texts])
        return value

    return run


def _write(connection: Connection, mark: str, texts: list[str]) -> None:
    columns = ["mark", "at", "by", "verb", "target", "details"]
    values = select(literal(mark), db_now(), *map(literal, texts)).where(~exists().where(orders.c.mark == mark))
    connection.execute(insert(orders).from_select(columns, values))
    number = connection.execute(select(func.max(orders.c.number))).scalar_one()
    if number % _PRUNE_EVERY == 0:
        connection.execute(delete(orders).where(orders.c.number <= number - MOST))


def page(connection: Connection, limit: int, before: int | None = None) -> list[LoggedOrder]:
    """Return the newest orders, or the newest ones before order number `before`; newest first."""
    older = True if before is None else orders.c.number < before
    columns = (orders.c.number, orders.c.at, orders.c.by, orders.c.verb, orders.c.target, orders.c.details)
    statement = select(*columns).where(older).order_by(orders.c.number.desc()).limit(limit)  # type: ignore[arg-type]
    return [LoggedOrder(*row) for row in connection.execute(statement)]


def prune(connection: Connection, days: float) -> int:
    """Remove orders older than `days`; return how many."""
    return connection.execute(delete(orders).where(orders.c.at < db_now() - days * 86_400)).rowcount

"""Unstorable values from plug-ins and engines: a failure of their source, not of the farm or the agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import IntegrityError, StatementError

from farm.errors import RolloutError
from farm.store.sql.database_errors import first_line, retryable_failure


@contextmanager
def fitting(kind: type[RolloutError], what: str) -> Iterator[None]:
    """Raise an error of `kind` if the body fails on an unstorable value: no JSON, a number too large, a wrong type.

    Errors of the database itself pass unchanged.
    """
    try:
        yield
    except (StatementError, OverflowError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, IntegrityError) or retryable_failure(error) is not None:
            raise
        raise kind(f"{what} cannot be stored: {type(error).__name__}: {first_line(error)[:300]}") from error

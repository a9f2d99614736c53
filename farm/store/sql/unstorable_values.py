"""Values from plug-ins and engines that no database takes: a failure of their source, not of the farm or agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import IntegrityError, StatementError

from farm.errors import RolloutError
from farm.store.sql.database_errors import first_line, retryable_failure


@contextmanager
def fitting(kind: type[RolloutError], what: str) -> Iterator[None]:
    """Raise an error of `kind` if the body is given what no database takes: no JSON, a number too large, a wrong type.

    Troubles of the database itself pass as they are.
    """
    try:
        yield
    except (StatementError, OverflowError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, IntegrityError) or retryable_failure(error) is not None:
            raise
        raise kind(f"{what} cannot be stored: {type(error).__name__}: {first_line(error)[:300]}") from error

"""Makes text and JSON storable in both databases, whatever a model, a tool or an engine wrote.

Postgres refuses NUL characters in text and NaN in JSON, and both databases refuse unpaired surrogates in text. Sampled
text must not fail its rollout, so unstorable characters are replaced here, at the edge of the store, and nowhere else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.types import TypeDecorator

from farm.errors import RolloutError
from farm.store.sql.database_errors import first_line, retryable_failure

_UNFIT = re.compile("[\0\ud800-\udfff]")
_LONGEST = 20_000
"""The number of characters that are kept of a message without a limit of its own."""


def plain(text: str, length: int = _LONGEST) -> str:
    """Return the text without unstorable characters, the middle cut out if it is longer than `length`."""
    fit = _UNFIT.sub("\ufffd", text)
    if len(fit) <= length:
        return fit
    half = (length - 3) // 2
    return f"{fit[:half]}...{fit[-half:]}" if half > 0 else fit[:length]


def is_plain(text: str, length: int = _LONGEST) -> bool:
    """Return whether a database can store the text unchanged; a text that it cannot store is in no row."""
    return len(text) <= length and _UNFIT.search(text) is None


def written(value: Any) -> str:
    """Return a value as JSON. Numbers that JSON lacks become null; escapes keep all characters of texts."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


class PlainText(TypeDecorator[str]):
    """A column for texts from outside; texts that are too long are cut in the middle."""

    impl: Any = Text
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.impl: Any = Text() if length is None else String(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else plain(value, self.length or _LONGEST)


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

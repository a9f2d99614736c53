"""Text and JSON as both databases can hold them, whatever a model, a tool or an engine wrote.

Postgres refuses NUL characters in text and NaN in JSON, both refuse halves of surrogate pairs in text. What a policy
samples must not end its rollout, so what cannot be held is replaced here, at the store's edge, and nowhere else.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sqlalchemy import String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

_UNFIT = re.compile("[\0\ud800-\udfff]")
_LONGEST = 20_000
"""Of a message that has no limit of its own, so many characters are kept."""


def plain(text: str, length: int = _LONGEST) -> str:
    """Return the text without what a database cannot hold, the middle cut out if it is longer than `length`."""
    fit = _UNFIT.sub("\ufffd", text)
    if len(fit) <= length:
        return fit
    half = (length - 3) // 2
    return f"{fit[:half]}...{fit[-half:]}" if half > 0 else fit[:length]


def is_plain(text: str, length: int = _LONGEST) -> bool:
    """Return whether a database can hold the text as it is: one that it cannot is in no row."""
    return len(text) <= length and _UNFIT.search(text) is None


def written(value: Any) -> str:
    """Return a value as JSON; what is no number in JSON is null. Escapes keep all characters of its texts."""
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
    """A column of texts that others wrote; longer ones than it holds are cut in the middle."""

    impl: Any = Text
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.impl: Any = Text() if length is None else String(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else plain(value, self.length or _LONGEST)

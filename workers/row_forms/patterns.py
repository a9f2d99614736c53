"""Regular expressions in rows: only those with linear matching time are accepted."""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

_MAX_CHARS = 500
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}


def sound_pattern(pattern: str) -> str:
    """Return a pattern. Raises ValueError for an invalid one, or one with nested repeats."""
    if not pattern:
        return pattern
    if len(pattern) > _MAX_CHARS:
        raise ValueError(f"a pattern has {len(pattern)} characters; {_MAX_CHARS} are allowed")
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if _nested(parsed, False):
        raise ValueError(f"{pattern!r} nests repeats, which may take forever on some answer: rewrite it without")
    return pattern


def _nested(node: Any, inside: bool) -> bool:
    if isinstance(node, parser.SubPattern):
        return any(_nested(each, inside) for each in node)
    if isinstance(node, list):
        return any(_nested(each, inside) for each in node)
    if isinstance(node, tuple):
        if node and str(node[0]) in _REPEATS and isinstance(node[1], tuple):
            _low, high, body = node[1]
            unbounded = high == parser.MAXREPEAT or high > 100
            return (inside and unbounded) or _nested(body, inside or unbounded)
        return any(_nested(each, inside) for each in node)
    return False

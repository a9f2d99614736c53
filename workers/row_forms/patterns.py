"""Regular expressions that rows bring along: only those whose matching takes time in proportion to the text."""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

_MAX_CHARS = 500
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}


def sound_pattern(pattern: str) -> str:
    """Return a pattern. Raises ValueError for one that is none, or that has repeats within repeats."""
    if not pattern:
        return pattern
    if len(pattern) > _MAX_CHARS:
        raise ValueError(f"a pattern of {len(pattern)} characters; {_MAX_CHARS} may be")
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    if _nested(parsed, False):
        raise ValueError(f"{pattern!r} repeats a repeat, which may take forever on some answer: write it without")
    return pattern


def _nested(node: Any, inside: bool) -> bool:
    """Return whether an unbounded repeat stands within another."""
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

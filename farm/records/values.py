"""Values that a request may carry: what JSON and both databases hold without a loss, and no more of it than is wise.

Python's own JSON takes NaN, integers of any size and halves of surrogate pairs; Postgres refuses the first, other
readers lose the second, and no file can hold the third. They are refused where they come in, by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_DEPTH = 64
"""Lists and objects within each other; Python's readers give up at a few hundred."""
_LARGEST = 2**63 - 1
_OVERHEAD = 4
"""Quotes, comma and colon around a value."""
_KEYS: tuple[type[Any], ...] = (str, int, float, type(None))
_WANTED = "give a text, a number, a list or an object"
_SUSPICIOUS = re.compile(rb"\\u0000|null|[0-9]{19}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
"""In the JSON of a value that may hold what it cannot carry: NaN is written as null, a UUID as its text."""
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def size_of(value: Any, most: int) -> int:
    """Return about how many bytes a value takes as JSON.

    Raises ValueError naming the place of what a request cannot carry, or saying that it is of more than `most` bytes.
    """
    try:
        written = orjson.dumps(value, option=_STRICT)
    except TypeError:
        return _size_by_parts(value, most)
    if len(written) > most or written.count(b"[") + written.count(b"{") > MAX_DEPTH or _SUSPICIOUS.search(written):
        return _size_by_parts(value, most)
    return len(written)


def storable(value: Any, most: int) -> None:
    """Raise ValueError naming the place of what JSON has not, or saying that it is of more than `most` bytes.

    More lenient than `size_of` is with requests: texts and floats may be any, as the store replaces what it cannot
    hold, and keys may be numbers, which become texts.
    """
    n_bytes = 0
    for path, part, depth in _parts(value, _KEYS):
        if depth > MAX_DEPTH:
            raise ValueError(f"{_at(path)[:40]}... is nested more than {MAX_DEPTH} deep, or holds itself")
        n_bytes += _OVERHEAD
        if isinstance(part, str):
            n_bytes += len(part)
        elif isinstance(part, Mapping) and not isinstance(part, dict):
            raise ValueError(f"{_at(path)} is a {type(part).__name__}, which JSON has not: {_WANTED}")
        elif not isinstance(part, float):
            n_bytes += _own_size(path, part)
        if n_bytes > most:
            raise ValueError(f"it has more than {most} bytes, as many as it may have")


def _size_by_parts(value: Any, most: int) -> int:
    n_bytes = 0
    for path, part, depth in _parts(value):
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:40]}… is nested more than {MAX_DEPTH} deep")
        n_bytes += _OVERHEAD + _own_size(path, part)
        if n_bytes > most:
            raise ValueError(f"it has more than {most} bytes, as many as it may have")
    return n_bytes


def _parts(value: Any, keys: tuple[type[Any], ...] = (str,)) -> Iterator[tuple[str, Any, int]]:
    """Yield every value within a value and where it lies, without recursion, which depth would break."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        yield path, part, depth
        if isinstance(part, Mapping):
            for name, inner in part.items():
                if not isinstance(name, keys):
                    raise ValueError(f"{path or 'it'} has the key {name!r:.200}, which is no string")
                place = f"{path}.{name}" if path else name
                waiting += [(place, name, depth + 1), (place, inner, depth + 1)]
        elif isinstance(part, list | tuple):
            waiting += [(f"{path}[{index}]", inner, depth + 1) for index, inner in enumerate(part)]


def _own_size(path: str, part: Any) -> int:
    if isinstance(part, str):
        return _text_size(path, part)
    if isinstance(part, bool) or part is None or isinstance(part, Mapping | list | tuple):
        return 1
    if isinstance(part, int):
        if abs(part) > _LARGEST:
            raise ValueError(f"{_at(path)} is an integer beyond 64 bits")
        return 8
    if isinstance(part, float):
        if not math.isfinite(part):
            raise ValueError(f"{_at(path)} is {part}, which JSON has not")
        return 8
    raise ValueError(f"{_at(path)} is a {type(part).__name__}, which JSON has not: {_WANTED}")


def _text_size(path: str, text: str) -> int:
    if "\0" in text:
        raise ValueError(f"{_at(path)} has a NUL character at {text.index(chr(0))}, which PostgreSQL cannot hold")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{_at(path)} has half a surrogate pair at {error.start}, which is no text") from None


def _at(path: str) -> str:
    return ascii(path)[1:-1][:200] or "it"

"""Values that a request may carry: those that JSON and both databases store without loss, within sane limits.

Python's JSON accepts NaN, integers of any size and unpaired surrogates; Postgres refuses the first, other readers lose
the second, and files cannot hold the third. They are refused on entry, with their path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_DEPTH = 64
"""Nesting of lists and objects; Python's readers give up at a few hundred."""
_LARGEST = 2**63 - 1
_OVERHEAD = 4
"""Quotes, comma and colon around a value."""
_KEYS: tuple[type[Any], ...] = (str, int, float, type(None))
_WANTED = "give a text, a number, a list or an object"
_SUSPICIOUS = re.compile(rb"\\u0000|null|[0-9]{19}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
"""Matches JSON that may stand for a refused value: NaN is written as null, a UUID as its text."""
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def size_of(value: Any, most: int) -> int:
    """Return the approximate size of a value as JSON, in bytes.

    Raises ValueError with the path of a value that a request cannot carry, or for more than `most` bytes.
    """
    try:
        written = orjson.dumps(value, option=_STRICT)
    except TypeError:
        return _size_by_parts(value, most)
    if len(written) > most or written.count(b"[") + written.count(b"{") > MAX_DEPTH or _SUSPICIOUS.search(written):
        return _size_by_parts(value, most)
    return len(written)


def storable(value: Any, most: int) -> None:
    """Raise ValueError with the path of a value that is not JSON, or for more than `most` bytes.

    More lenient than `size_of` for requests: any text and float is accepted, as the store replaces those that it cannot
    hold, and keys may be numbers, which become texts.
    """
    n_bytes = 0
    for path, part, depth in _parts(value, _KEYS):
        if depth > MAX_DEPTH:
            raise ValueError(f"{_at(path)[:40]}... is nested more than {MAX_DEPTH} deep, or contains itself")
        n_bytes += _OVERHEAD
        if isinstance(part, str):
            n_bytes += len(part)
        elif isinstance(part, Mapping) and not isinstance(part, dict):
            raise ValueError(f"{_at(path)} is a {type(part).__name__}, which is not JSON-serializable: {_WANTED}")
        elif not isinstance(part, float):
            n_bytes += _own_size(path, part)
        if n_bytes > most:
            raise ValueError(f"it has more than the {most} bytes allowed")


def _size_by_parts(value: Any, most: int) -> int:
    n_bytes = 0
    for path, part, depth in _parts(value):
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:40]}… is nested more than {MAX_DEPTH} deep")
        n_bytes += _OVERHEAD + _own_size(path, part)
        if n_bytes > most:
            raise ValueError(f"it has more than the {most} bytes allowed")
    return n_bytes


def _parts(value: Any, keys: tuple[type[Any], ...] = (str,)) -> Iterator[tuple[str, Any, int]]:
    """Yield every nested value with its path and depth, without recursion, which deep values would break."""
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        yield path, part, depth
        if isinstance(part, Mapping):
            for name, inner in part.items():
                if not isinstance(name, keys):
                    raise ValueError(f"{path or 'it'} has the key {name!r:.200}, which is not a string")
                inner_path = f"{path}.{name}" if path else name
                waiting += [(inner_path, name, depth + 1), (inner_path, inner, depth + 1)]
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
            raise ValueError(f"{_at(path)} is {part}, which is not a JSON number")
        return 8
    raise ValueError(f"{_at(path)} is a {type(part).__name__}, which is not JSON-serializable: {_WANTED}")


def _text_size(path: str, text: str) -> int:
    if "\0" in text:
        raise ValueError(f"{_at(path)} has a NUL character at {text.index(chr(0))}, which PostgreSQL cannot hold")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{_at(path)} has an unpaired surrogate at {error.start}, which is not text") from None


def _at(path: str) -> str:
    return ascii(path)[1:-1][:200] or "it"

"""Files of JSON, read as they stand or refused with their place, never read otherwise than they were meant."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from farm.errors import InvalidRequest

WANTED = "one JSON object per line, in UTF-8"
_GZIP = b"\x1f\x8b"
_UTF_8_MARK = b"\xef\xbb\xbf"


def text_of(path: Path) -> str:
    """Return the text of a file, packed by gzip or not. Raises InvalidRequest, OSError."""
    data = path.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise InvalidRequest(
                f"it begins as a gzip file and cannot be unpacked: {error}", field=str(path)
            ) from error
    if b"\0" in data[:4096]:
        raise InvalidRequest(f"it is no UTF-8, but UTF-16 or no text; wanted is {WANTED}", field=str(path))
    try:
        # the mark that some editors put before UTF-8
        return data.removeprefix(_UTF_8_MARK).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest(f"it is no UTF-8; wanted is {WANTED}", field=f"{path}:{line}") from error


def parsed(text: str, place: str) -> Any:
    """Return the value of a JSON text in which no name stands twice. Raises InvalidRequest, of `place`."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        raise InvalidRequest(str(error), field=place) from None
    except ValueError as error:
        raise InvalidRequest(f"no JSON: {error}; wanted is {WANTED}", field=place) from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deep", field=place) from error


class _TwiceError(Exception):
    """A name stands twice in one object: JSON readers differ in which they take."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _TwiceError(f"{twice!r} stands twice in one object")
    return values

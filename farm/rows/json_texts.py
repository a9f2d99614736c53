"""JSON files, taken literally or refused with their place, never reinterpreted."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from farm.errors import InvalidRequest

WANTED = "one JSON object per line, in UTF-8"
PARQUET = (".parquet", ".pq")
_HEAD = 256
_TO_JSON = "`python -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' <FILE`"
_KINDS = {
    ".csv": ("CSV", f"convert it by {_TO_JSON}"),
    ".tsv": ("TSV", "convert it to lines of JSON, as a CSV with delimiter='\\t'"),
    ".xlsx": ("a spreadsheet", "save it as CSV, and convert that to lines of JSON"),
    ".arrow": ("Arrow", "write it as parquet: `Dataset.load_from_disk(FOLDER).to_parquet(FILE)`"),
    ".feather": ("Arrow", "write it as parquet: `pandas.read_feather(FILE).to_parquet(FILE)`"),
    ".pkl": ("a pickle", "write it as lines of JSON or parquet; no pickle is ever loaded"),
}
"""Unsupported kinds of files by suffix: the name, and the remedy."""
_GZIP = b"\x1f\x8b"
_UTF_8_MARK = b"\xef\xbb\xbf"


def text_of(path: Path) -> str:
    """Return the text of a file, possibly gzipped. Raises InvalidRequest, OSError."""
    data = path.read_bytes()
    check_kind(path, data[:_HEAD])
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise InvalidRequest(f"it has a gzip header but cannot be unpacked: {error}", field=str(path)) from error
    if b"\0" in data[:4096]:
        raise InvalidRequest(f"it is not UTF-8, but UTF-16 or binary; expected: {WANTED}", field=str(path))
    try:
        # the byte order mark that some editors write
        return data.removeprefix(_UTF_8_MARK).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        at = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        reason = f"it is not UTF-8 at byte {at} of the line (0x{data[error.start]:02x}); expected: {WANTED}"
        raise InvalidRequest(
            f"{reason}: `iconv -f latin1 -t utf-8` converts Latin-1", field=f"{path}:{line}"
        ) from error


def check_kind(path: Path, head: bytes) -> None:
    """Raise InvalidRequest if a file's suffix or first bytes show an unsupported kind."""
    begins = head.removeprefix(_UTF_8_MARK).lstrip().lower()
    kind, remedy = _KINDS.get(path.suffix.lower(), ("", ""))
    if begins.startswith(b"version https://git-lfs"):
        kind, remedy = "a pointer of Git LFS", "fetch the file itself by `git lfs pull`"
    elif begins.startswith((b"<!doctype", b"<html", b"<?xml")):
        kind, remedy = "a page of HTML", "fetch the file itself, such as by the `resolve` address of a hub"
    elif begins.startswith(b"par1") and path.suffix not in PARQUET:
        kind, remedy = "parquet", "give it a name that ends in .parquet, and read it as rows (--as FORM)"
    elif not kind and head.startswith((b"PK\3\4", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        kind, remedy = "a packed file", "unpack it; of packed files only those of gzip are read"
    if kind:
        raise InvalidRequest(f"it is {kind}; rows are read from .jsonl, .json and .parquet: {remedy}", field=str(path))


def parsed(text: str, place: str) -> Any:
    """Return the value of a JSON text without duplicate keys. Raises InvalidRequest with `place` as its field."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        raise InvalidRequest(str(error), field=place) from None
    except json.JSONDecodeError as error:
        # the place of a single line has its number already
        of_line = f"line {error.lineno}, " if "\n" in text.strip("\n") else ""
        at = f"{of_line}character {error.colno}"
        raise InvalidRequest(f"not JSON: {error.msg} at {at}; expected: {WANTED}", field=place) from error
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}; expected: {WANTED}", field=place) from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply: leave out what is not needed", field=place) from error


class _TwiceError(Exception):
    """A duplicate key in one object, which JSON readers resolve differently."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _TwiceError(f"{twice!r} occurs twice in one object: keep one of them")
    return values

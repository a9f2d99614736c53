"""Files of rows: lines of JSON, one JSON array, or parquet, each row with its number from 1."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from farm.errors import InvalidRequest, NotInstalled
from farm.rows.json_texts import PARQUET, WANTED, check_kind, parsed, text_of

_ROWS_AT_A_TIME = 1024


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any] | InvalidRequest]]:
    """Yield the rows of a file, with errors in place of invalid ones.

    Raises InvalidRequest if the file itself is broken, NotInstalled for parquet without pyarrow, OSError. A null in
    parquet counts as a missing column: columnar files cannot distinguish the two.
    """
    if path.suffix in PARQUET:
        yield from _parquet(path)
        return
    text = text_of(path)
    if text.lstrip().startswith("["):
        for number, value in enumerate(parsed(text, str(path)), 1):
            yield number, _row(value, f"{path}:{number}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            yield number, _row(parsed(line, place), place)
        except InvalidRequest as error:
            yield number, error


def _row(value: Any, place: str) -> dict[str, Any] | InvalidRequest:
    if isinstance(value, dict):
        return value
    return InvalidRequest(f"this is not a JSON object, but {_kind(value)}; expected: {WANTED}", field=place)


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if find_spec("pyarrow") is None:
        raise NotInstalled(
            f"{path}: parquet needs pyarrow, which is not installed here: pip install 'rollout-farm[rows]'"
        )
    with path.open("rb") as opened:
        check_kind(path, opened.read(256))
    # imported here: slow to load, and only needed for parquet
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: _plain(value) for name, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        reason = f"it cannot be read as parquet: {str(error).rstrip('.')}"
        remedy = "is it whole? fetch or write it again"
        raise InvalidRequest(f"{reason}: {remedy}", field=f"{path}:{number + 1}" if number else str(path)) from error


def _plain(value: Any) -> Any:
    """Return a value of pyarrow in JSON's types; others stay, and are refused with their place later."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value

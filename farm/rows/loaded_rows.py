"""The rows of a file as instances, all of them checked before any is used.

A file has lines of JSON, one JSON array, or parquet. JSON is taken literally or refused with its location, never
reinterpreted.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from farm.errors import InvalidRequest, NotInstalled
from farm.records.request import MAX_INSTANCES, Instance
from farm.rows.row_forms import FORMS, SWE, Row, RowForm, known_by, prompt_text

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

_ROWS_AT_A_TIME = 1024
MAX_COMPLAINTS = 20
"""Faulty rows that are reported at a time."""
_MOST_COLUMNS = 20
COLUMNS = "columns"
"""The form of rows whose columns are mapped to the fields of a data source."""


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


def parsed(text: str, field: str) -> Any:
    """Return the value of a JSON text without duplicate keys. Raises InvalidRequest that names `field`."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _TwiceError as error:
        raise InvalidRequest(str(error), field=field) from None
    except json.JSONDecodeError as error:
        # the location of a single line has its number already
        of_line = f"line {error.lineno}, " if "\n" in text.strip("\n") else ""
        at = f"{of_line}character {error.colno}"
        raise InvalidRequest(f"not JSON: {error.msg} at {at}; expected: {WANTED}", field=field) from error
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}; expected: {WANTED}", field=field) from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply: leave out what is not needed", field=field) from error


class _TwiceError(Exception):
    """A duplicate key in one object, which JSON readers resolve differently."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _TwiceError(f"{twice!r} occurs twice in one object: keep one of them")
    return values


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
        location = f"{path}:{number}"
        try:
            yield number, _row(parsed(line, location), location)
        except InvalidRequest as error:
            yield number, error


def _row(value: Any, field: str) -> dict[str, Any] | InvalidRequest:
    if isinstance(value, dict):
        return value
    return InvalidRequest(f"this is not a JSON object, but {_kind(value)}; expected: {WANTED}", field=field)


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
    """Return a value of pyarrow in JSON's types; others stay, and are refused with their location later."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """The instances of a file and the number of each row; `n_rows` were read, `n_repeats` of them skipped."""

    file: str
    instances: list[Instance] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    n_rows: int = 0
    n_repeats: int = 0


def read_rows(
    path: Path | str,
    form: str,
    *,
    columns: Mapping[str, str] | None = None,
    data_source: str = "",
    deduplicate: bool | None = None,
    given: Mapping[str, str] | None = None,
) -> LoadedRows:
    """Return the rows of a `.jsonl`, `.json` or `.parquet` file as instances for their handlers.

    `form` is one of FORMS, or `columns`: then `data_source` names the handler, and the row's columns are its fields.
    `columns` maps fields to columns, `{"question": "problem"}`: with the form `columns` only these are taken; a dot
    selects inside a column. `deduplicate` skips rows with a repeated index or prompt; None: as the form says. `given`
    are columns for rows that lack them, if the form allows it: `{"env_class": "gsm8k"}`. Raises InvalidRequest with up
    to MAX_COMPLAINTS wrong rows; NotInstalled; OSError.
    """
    path = Path(path)
    rule = _form(form, data_source)
    columns, given = columns or {}, given or {}
    for name in given:
        if name not in rule.settable:
            raise InvalidRequest(f"{form} accepts {' and '.join(rule.settable) or 'none'} for all rows", field=name)
    once = _Repeats(rule.deduplicate if deduplicate is None else deduplicate)
    loaded = LoadedRows(str(path))
    complaints: list[tuple[str, str]] = []
    n_rows = 0
    for number, row in rows_of(path):
        n_rows += 1
        location = f"{path}:{number}"
        try:
            if isinstance(row, InvalidRequest):
                raise ValueError(row.complaints[0][1])
            renamed = {**given, **_renamed(row, columns, only=form == COLUMNS)}
            if once.seen(renamed, number):
                continue
            instance = _instance(rule, renamed, data_source)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            complaints.append((location, _words(error)))
            if len(complaints) == MAX_COMPLAINTS:
                break
            continue
        loaded.instances.append(instance)
        loaded.numbers.append(number)
        if len(loaded.instances) > MAX_INSTANCES:
            raise InvalidRequest(f"it has more than {MAX_INSTANCES} problems: split it into several", field=str(path))
    if complaints:
        raise InvalidRequest.of(complaints)
    if not n_rows:
        raise InvalidRequest(f"it has no rows; expected: {WANTED}, or parquet", field=str(path))
    return LoadedRows(str(path), _named(loaded), loaded.numbers, n_rows, once.n_repeats)


def _form(form: str, data_source: str) -> RowForm:
    if form == COLUMNS:
        if not data_source:
            raise InvalidRequest("name the handler for the columns, such as answer", field="data_source")
        return RowForm(lambda row: data_source, "")
    if form not in FORMS:
        raise InvalidRequest(f"there is no form {form!r}; known: {', '.join([*FORMS, COLUMNS])}", field="as")
    return FORMS[form]


def _renamed(row: Row, columns: Mapping[str, str], *, only: bool) -> dict[str, Any]:
    """Return a row with its columns under their new names. Raises ValueError for a missing column."""
    renamed = {} if only and columns else {name: value for name, value in row.items() if name not in columns.values()}
    for name, column in columns.items():
        value: Any = row
        for part in column.split(".") if column not in row else [column]:
            if not isinstance(value, Mapping) or part not in value:
                remedy = f"name another for {name!r} (--map {name}=COLUMN)"
                raise ValueError(f"it has no column {column!r}, only {_columns(row)}: {remedy}")
            value = value[part]
        renamed[name] = value
    return renamed


def _instance(rule: RowForm, row: Row, data_source: str) -> Instance:
    try:
        handler = data_source or rule.handler(row)
        fields = rule.fields(row)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "read it as another form (--as), or name a column (--map NAME=COLUMN)"
        raise ValueError(f"{_words(error)}; its columns are {_columns(row)}: {remedy}") from error
    # a nested row has the name of the problem
    name = known_by(fields) if handler == SWE else ""
    return Instance(data_source=handler, fields=fields, instance_id=name or known_by(row))


def _named(result: LoadedRows) -> list[Instance]:
    """Return the instances; those without a name, or with an ambiguous one, are named by their content."""
    contents: dict[tuple[str, str], str] = {}
    ambiguous: set[tuple[str, str]] = set()
    for instance in result.instances:
        key, content = (instance.data_source, instance.instance_id), _digest(instance.fields)
        if contents.setdefault(key, content) != content:
            ambiguous.add(key)
    return [
        each.model_copy(update={"instance_id": each.digest[:16]})
        if not each.instance_id or (each.data_source, each.instance_id) in ambiguous
        else each
        for each in result.instances
    ]


class _Repeats:
    """The rows read so far, by index and by prompt; `n_repeats` counts repeated ones."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._by_key: dict[str, tuple[int, str]] = {}
        self.n_repeats = 0

    def seen(self, row: Row, number: int) -> bool:
        """Return whether a row repeats an earlier one. ValueError if it differs from one with the same index."""
        if not self._wanted:
            return False
        content = _digest(row)
        name, prompt = known_by(row), prompt_text(row)
        keys = [key for key in (name and f"index {name}", prompt and f"prompt {_digest(prompt)}") if key]
        keys = keys or [content]
        first = next((self._by_key[key] for key in keys if key in self._by_key), None)
        if first is None:
            self._by_key.update(dict.fromkeys(keys, (number, content)))
            return False
        if name and f"index {name}" in self._by_key and self._by_key[f"index {name}"][1] != content:
            remedy = "give each its own, or read all (--no-deduplicate)"
            raise ValueError(f"its index {name!r} is that of row {first[0]}, which is another problem: {remedy}")
        self.n_repeats += 1
        return True


def _columns(row: Row) -> str:
    return ", ".join(list(row)[:_MOST_COLUMNS]) + (", …" if len(row) > _MOST_COLUMNS else "") if row else "none"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _words(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first: Sequence[Any] = error.errors(include_url=False, include_input=False)
        return "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}" for each in first[:3]
        )
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

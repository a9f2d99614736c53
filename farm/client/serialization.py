"""Serialization of records as JSON; arrays are the packed bytes of the database, in base64.

Both sides use the standard library's JSON: it keeps floats exactly, and texts and integers written by models, which
stricter libraries refuse or round.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel

from farm.records.packed_array import pack, unpack

T = TypeVar("T")
Reader = Callable[[Any], Any]

MAX_BODY_BYTES = 128_000_000
"""Limit of one request; larger ones are refused unread."""
TOO_LARGE = f"an HTTP request may have at most {MAX_BODY_BYTES} bytes: submit several batches"


def written(value: Any) -> bytes:
    """Return a value of the farm's types as JSON. Raises ValueError for values that JSON cannot hold."""
    try:
        return json.dumps(value, default=_plain, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return b64encode(pack(value)).decode()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"not JSON-serializable: {type(value).__name__}")


def parsed(data: bytes) -> Any:
    """Return the parsed JSON. Raises ValueError for invalid or too deeply nested JSON."""
    try:
        return json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read(kind: type[T], data: bytes) -> T:
    """Return the value of a type from its `written` form; unknown fields are ignored. Raises ValueError."""
    try:
        value: T = _reader(kind)(parsed(data))  # type: ignore[arg-type]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is not a valid {kind}: {error}") from error
    if kind in (str, int, bool, dict) and not isinstance(value, kind):
        raise ValueError(f"it is not a valid {kind.__name__}")
    return value


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _reader(kind: Any) -> Reader:
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _of_dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if origin is np.ndarray:
        return lambda text: unpack(b64decode(text, validate=True))
    if origin in (Union, UnionType):
        return _of_union(parts)
    if origin in (tuple, list):
        one = _reader(parts[0])
        return lambda values: origin(map(one, values))
    if origin is dict:
        name, inner = map(_reader, parts)
        return lambda values: {name(key): inner(value) for key, value in values.items()}
    return _as_it_is


def _of_dataclass(kind: Any) -> Reader:
    types = get_type_hints(kind)
    readers = [(each.name, _reader(types[each.name])) for each in fields(kind)]

    def one(values: Any) -> Any:
        return kind(**{name: reader(values[name]) for name, reader in readers if name in values})

    return one


def _of_union(parts: tuple[Any, ...]) -> Reader:
    readers = [reader for part in parts if part is not type(None) and (reader := _reader(part)) is not _as_it_is]
    if not readers:
        return _as_it_is
    # at most one type of a union is written differently from plain JSON
    [one] = readers
    return lambda value: None if value is None else one(value)

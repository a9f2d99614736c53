"""Tests stored as base64 of zlib: in LiveCodeBench of a pickle of one text, in NeMo Gym of JSON."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

MAX_BYTES = 256_000_000
_BROKEN = (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError)


class TextUnpickler(pickle.Unpickler):
    """Unpickles values without classes and functions; a pickle that names one is refused before anything runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; only a text is allowed")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an outside object; only a text is allowed")


def pickled_text(encoded: str) -> str:
    """Return the text. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        text = TextUnpickler(io.BytesIO(_unpacked(encoded))).load()
    except _BROKEN as error:
        raise ValueError(f"the tests are not base64 of zlib of a pickled text: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"the pickle of the tests holds a {type(text).__name__}, not a text")
    return text


def packed_json(encoded: str) -> Any:
    """Return the JSON value. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        return json.loads(_unpacked(encoded))
    except (*_BROKEN, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are not base64 of zlib of JSON: {error}") from None


def _unpacked(encoded: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(encoded, validate=True), MAX_BYTES)
    if not unpacker.eof:
        raise ValueError(f"it is truncated, or has more than {MAX_BYTES} bytes")
    return data

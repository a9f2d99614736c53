"""Tests that rows keep as base64 of zlib: LiveCodeBench of a pickle of one text, of nothing else; NeMo Gym of JSON."""

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
    """Unpickles values that need no class and no function; a pickle that names one is refused before anything runs."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; only a text may be in it")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside; only a text may be in it")


def pickled_text(encoded: str) -> str:
    """Return the text. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        text = TextUnpickler(io.BytesIO(_unpacked(encoded))).load()
    except _BROKEN as error:
        raise ValueError(f"the tests are no base64 of zlib of a pickled text: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"the pickle of the tests holds a {type(text).__name__}, not a text")
    return text


def packed_json(encoded: str) -> Any:
    """Return the value of JSON. Raises ValueError for anything else, and for more than MAX_BYTES."""
    try:
        return json.loads(_unpacked(encoded))
    except (*_BROKEN, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are no base64 of zlib of JSON: {error}") from None


def _unpacked(encoded: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(encoded, validate=True), MAX_BYTES)
    if not unpacker.eof:
        raise ValueError(f"it is cut off, or has more than {MAX_BYTES} bytes")
    return data

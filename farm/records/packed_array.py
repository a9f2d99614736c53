"""Compressed binary form of numeric arrays: token ids, log-probabilities and masks are stored and sent in it.

Layout of a value, all numbers little-endian:

    byte 0       1, the version of this layout
    byte 1       the element type: b"i" int32, b"f" float32, b"B" uint8, b"H" uint16
    bytes 2-5    the number of elements, uint32
    bytes 6-     one zstandard frame holding the elements, back to back

JSON lists of numbers would take 5 times the space and 100 times the time.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

_HEADER = struct.Struct("<BcI")
_VERSION = 1
_TYPES: dict[bytes, np.dtype[Any]] = {
    b"i": np.dtype("<i4"),
    b"f": np.dtype("<f4"),
    b"B": np.dtype("u1"),
    b"H": np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}
_LEVEL = 1


def pack(array: NDArray[Any]) -> bytes:
    """Return the binary form of a one-dimensional array of one of these types. Raises ValueError for others."""
    code = _CODES.get(array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
    if code is None or array.ndim != 1:
        raise ValueError(f"cannot pack a {array.ndim}-dimensional array of {array.dtype}")
    data = np.ascontiguousarray(array, dtype=_TYPES[code]).tobytes()
    return _HEADER.pack(_VERSION, code, len(array)) + zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def unpack(data: bytes) -> NDArray[Any]:
    """Return the array, read-only. Raises ValueError for invalid bytes."""
    try:
        version, code, count = _HEADER.unpack_from(data)
        dtype = _TYPES[code]
        if version != _VERSION:
            raise ValueError(f"layout version {version}")
        frame = memoryview(data)[_HEADER.size :]
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count * dtype.itemsize)
    except (struct.error, KeyError, zstandard.ZstdError) as error:
        raise ValueError(f"not a packed array: {error}") from error
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"a packed array of {count} elements holds {len(raw)} bytes")
    array: NDArray[Any] = np.frombuffer(raw, dtype=dtype)
    return array

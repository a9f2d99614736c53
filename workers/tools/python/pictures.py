"""Dimensions of an image, from the first bytes of its file."""

from __future__ import annotations

import struct

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
# Not all markers from C0 to CF are frames: C4, C8 and CC are tables (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def dimensions(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG or JPEG in pixels; None for other or truncated files."""
    try:
        if data.startswith(_PNG):
            # The first chunk is IHDR; width and height are its first fields.
            width, height = struct.unpack_from("!II", data, 16)
            return width, height
        return _of_jpeg(data) if data.startswith(_JPEG) else None
    except struct.error:
        return None


def _of_jpeg(data: bytes) -> tuple[int, int] | None:
    start = 2
    while True:
        prefix, marker, n_bytes = struct.unpack_from("!BBH", data, start)
        if prefix != 0xFF:
            return None
        if marker in _FRAMES:
            height, width = struct.unpack_from("!HH", data, start + 5)
            return width, height
        start += 2 + n_bytes

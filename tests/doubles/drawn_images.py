"""Single-colour images, as PNG files."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int = 28, height: int = 28, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """Return an image of a size in pixels and an RGB colour."""
    lines = (b"\0" + bytes(colour) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    name, data = chunk
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def base64_of(data: bytes) -> str:
    """Return bytes in base64, as in requests."""
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    """Return an image as a `data:` URL."""
    return f"data:image/png;base64,{base64_of(data)}"

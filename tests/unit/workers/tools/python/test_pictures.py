"""Dimensions of pictures."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from tests.contract.sandboxes.kernel.kernels import png
from workers.tools.python import dimensions


def jpeg(width: int, height: int, frame: int) -> bytes:
    """Return the segments of a JPEG file up to its frame: an application's, a table with a marker like a frame's."""
    segments = ((0xE0, b"JFIF\0" + bytes(9)), (0xC4, bytes(20)), (frame, struct.pack("!BHHB", 8, height, width, 3)))
    return b"\xff\xd8" + b"".join(struct.pack("!BBH", 0xFF, kind, 2 + len(data)) + data for kind, data in segments)


def test_dimensions_of_png_are_read() -> None:
    assert dimensions(png(640, 480)) == (640, 480)


def test_dimensions_of_jpeg_are_read() -> None:
    for frame in (0xC0, 0xC2, 0xCF):
        assert dimensions(jpeg(640, 480, frame)) == (640, 480)


def test_other_formats_and_truncated_files_have_no_dimensions() -> None:
    assert dimensions(b"") is None
    assert dimensions(b"<svg/>") is None
    assert dimensions(png(1, 1)[:20]) is None
    assert dimensions(jpeg(1, 1, 0xC0)[:-5]) is None
    assert dimensions(b"\xff\xd8\x00\xc0\x00\x11\x08\x00\x01\x00\x01") is None


@given(st.binary(max_size=60))
def test_garbage_raises_nothing(data: bytes) -> None:
    for start in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"):
        result = dimensions(start + data)
        assert result is None or all(number >= 0 for number in result)

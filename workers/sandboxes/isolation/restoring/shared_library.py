"""The name in a shared library (SONAME), which `ldconfig` uses instead of the file's name. Standard library only."""

from __future__ import annotations

import os
import struct

_HEADER = struct.Struct("<16sHHIQQQIHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_LOAD, _DYNAMIC = 1, 2
_STRINGS, _SONAME = 5, 14
_MAX_SEGMENTS = 64
_MAX_DYNAMIC = 65_536
_MAX_NAME = 256


def soname(path: str) -> str | None:
    """Return the SONAME of a 64-bit library; empty if it has none or is no library, None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        head = os.pread(descriptor, _HEADER.size, 0)
        if not head.startswith(b"\x7fELF"):
            return ""
        return _soname(descriptor, head)
    except (struct.error, OSError, ValueError, OverflowError, KeyError):
        return None
    finally:
        os.close(descriptor)


def _soname(descriptor: int, head: bytes) -> str | None:
    identity, *_, offset, _, _, _, size, number = _HEADER.unpack(head)
    if identity[4:6] != b"\x02\x01" or size != _SEGMENT.size or number > _MAX_SEGMENTS:
        return None
    table = os.pread(descriptor, size * number, offset)
    segments = [_SEGMENT.unpack_from(table, size * each) for each in range(number)]
    values: dict[int, int] = {}
    for kind, _, start, _, _, length, _, _ in segments:
        if kind == _DYNAMIC:
            data = os.pread(descriptor, min(length, _MAX_DYNAMIC), start)
            for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
                tag, value = _ENTRY.unpack_from(data, at)
                if tag == 0:
                    break
                values.setdefault(tag, value)
    if _SONAME not in values:
        return ""
    for kind, _, start, address, _, length, _, _ in segments:
        if kind == _LOAD and address <= values[_STRINGS] < address + length:
            name_at = start + values[_STRINGS] - address + values[_SONAME]
            return os.pread(descriptor, _MAX_NAME, name_at).partition(b"\0")[0].decode("utf-8", "replace")
    return None

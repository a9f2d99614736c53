"""Values as data, exchanged between a program's judge and its process.

Only None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset: received values are of exactly
these types, whatever class they had before, so that no method of a program ever runs in the judge. A numpy scalar
becomes a Python number. This module is part of the source of both processes, runs with the Python of a sandbox (3.8 or
newer), and uses only the standard library.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_BYTES = 16 << 20


class NotData(Exception):
    """A value that cannot be passed on as data."""


def packed(value: Any) -> Any:
    """Return a value as JSON. Raises NotData."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, str):
        return ["s", str.__str__(value)]
    if isinstance(value, bytes):
        return ["b", value.hex()]
    if isinstance(value, dict):
        return ["d", [[packed(key), packed(item)] for key, item in dict.items(value)]]
    for tag, kind in (("l", list), ("t", tuple), ("e", set), ("z", frozenset)):
        if isinstance(value, kind):
            return [tag, [packed(item) for item in value]]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        plain = value.item()
        if type(plain).__module__ == "builtins":
            return packed(plain)
    raise NotData(f"a {type(value).__name__} is not plain data")


def unpacked(data: Any) -> Any:
    """Return the value of JSON made by `packed`. Raises NotData for other JSON."""
    if data is None or data is True or data is False:
        return data
    if not isinstance(data, list) or len(data) != 2:
        raise NotData("no value")
    try:
        tag, content = data
        return _KINDS[tag](content)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise NotData(str(error)) from None


def _items(content: Any) -> list[Any]:
    return [unpacked(item) for item in content]


_KINDS: dict[str, Any] = {
    "i": lambda content: int(content, 16),
    "f": float.fromhex,
    "c": lambda content: complex(float.fromhex(content[0]), float.fromhex(content[1])),
    "s": lambda content: "".join([content]),
    "b": bytes.fromhex,
    "d": lambda content: {unpacked(key): unpacked(item) for key, item in content},
    "l": _items,
    "t": lambda content: tuple(_items(content)),
    "e": lambda content: set(_items(content)),
    "z": lambda content: frozenset(_items(content)),
}


def send(connection: socket.socket, message: Any) -> None:
    """Write one message of JSON. Raises OSError, and NotData if it is too large."""
    data = json.dumps(message).encode()
    if len(data) > MAX_BYTES:
        raise NotData(f"a value of {len(data)} bytes")
    connection.sendall(struct.pack("I", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Read one message. Raises EOFError at the end, NotData for malformed data, OSError."""
    (size,) = struct.unpack("I", _exactly(connection, 4))
    if size > MAX_BYTES:
        raise NotData(f"a value of {size} bytes")
    try:
        return json.loads(_exactly(connection, size))
    except (ValueError, RecursionError) as error:
        raise NotData(str(error)) from None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk: bytes | None = connection.recv(min(size - len(data), 1 << 16))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)

"""The protocol between an interpreter in a sandbox and its worker: cells and results. Standard library only.

Both ends use this module. A frame consists of the lengths of its two parts, a JSON object, and bytes. Output is not
part of the protocol: it is read from a pipe while the cell runs, so it is bounded, and available if the interpreter is
killed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

HEADER = struct.Struct("!II")
MAX_HEAD = 65_536
MAX_IMAGES = 16
MAX_IMAGE_BYTES = 8 << 20
"""Maximum size of all images of a cell together."""

CONNECTION = 3
"""The interpreter's descriptor of the socket on which cells arrive."""

MEDIA_TYPES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}
"""The media types from which one image of a rich result is kept, in order of preference, and their file extensions."""


def packed(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    encoded = json.dumps(head).encode()
    return HEADER.pack(len(encoded), len(body)) + encoded + body


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive the next frame. Raises EOFError if the other end is closed."""
    n_head, n_body = HEADER.unpack(_exactly(connection, HEADER.size))
    return json.loads(_exactly(connection, n_head)), _exactly(connection, n_body)


def _exactly(connection: socket.socket, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        chunk = connection.recv(n_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class Images:
    """The images of one cell, within the limits."""

    def __init__(self) -> None:
        self._images: list[tuple[str, bytes]] = []
        self._n_bytes = 0

    def add(self, data: Mapping[str, Any]) -> str:
        """Keep the best image of a rich result, if it has one. Return why an image is not kept, else an empty text."""
        for media_type in MEDIA_TYPES:
            if media_type in data:
                return self._add(media_type, _decoded(media_type, data[media_type]))
        return ""

    def _add(self, media_type: str, image: bytes) -> str:
        if not image:
            return f"[{media_type}: not kept, it is not valid]"
        if len(self._images) == MAX_IMAGES:
            return f"[{media_type}: not kept, a cell may show {MAX_IMAGES} images]"
        if self._n_bytes + len(image) > MAX_IMAGE_BYTES:
            return f"[{media_type}: not kept, the images of a cell may have {MAX_IMAGE_BYTES >> 20} MB together]"
        self._n_bytes += len(image)
        self._images.append((media_type, image))
        return ""

    def take(self) -> tuple[list[tuple[str, int]], bytes]:
        """Return the type and size of each image, and the bytes of all; then forget them."""
        images, self._images, self._n_bytes = self._images, [], 0
        return [(media_type, len(image)) for media_type, image in images], b"".join(image for _, image in images)


def _decoded(media_type: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        return b""
    if media_type == "image/svg+xml":
        return value.encode("utf-8", "replace")
    try:
        return base64.b64decode(value)
    except binascii.Error:
        return b""


def leave_only(folder: str, packages: str) -> None:
    """Let imports find this Python's own modules, then those in `packages`, but not those of the farm."""
    # last, so that packages of the sandbox's own Python take precedence
    sys.path[:] = ["", *(path for path in sys.path if path not in ("", folder)), f"{folder}/{packages}"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "workers"]:
        del sys.modules[name]


def serve(connection: socket.socket, run: Callable[[str], str], images: Images) -> None:
    """Run cells until the other end is closed, then exit. `run` returns the name of the error, or an empty text."""
    own = os.getpid()
    while True:
        try:
            head, code = receive(connection)
            error = run(code.decode())
            if os.getpid() != own:
                # this is a child process that the cell forked
                os._exit(0)
            heads, body = images.take()
            connection.sendall(packed({"cell": head["cell"], "error": error, "images": heads}, body))
        except (EOFError, OSError):
            os._exit(0)

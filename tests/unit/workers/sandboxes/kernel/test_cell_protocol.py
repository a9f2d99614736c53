"""The protocol between a worker and an interpreter."""

from __future__ import annotations

import base64
import socket

import pytest

from workers.sandboxes.kernel import cell_protocol
from workers.sandboxes.kernel.cell_protocol import Images, packed, receive


def test_frames_are_received_as_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(packed({"cell": 1, "text": "ä"}, b"x" * 50_000) + packed({}))
        assert receive(theirs) == ({"cell": 1, "text": "ä"}, b"x" * 50_000)
        assert receive(theirs) == ({}, b"")


@pytest.mark.parametrize("sent", [b"", packed({"cell": 1}, b"body")[:-1]])
def test_truncated_frame_is_the_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


def test_best_image_format_is_kept() -> None:
    images = Images()
    assert images.add({"text/plain": "text", "image/svg+xml": "<svg/>", "image/png": b"png"}) == ""
    assert images.add({"image/jpeg": base64.b64encode(b"jpeg").decode()}) == ""
    assert images.add({"image/svg+xml": "<ä/>"}) == ""
    assert images.add({"text/html": "<b/>"}) == ""
    kinds = [("image/png", 3), ("image/jpeg", 4), ("image/svg+xml", 5)]
    assert images.take() == (kinds, b"pngjpeg" + "<ä/>".encode())
    assert images.take() == ([], b"")


@pytest.mark.parametrize("value", [None, 5, "x", b"", ["image"]])
def test_invalid_image_is_refused(value: object) -> None:
    images = Images()
    assert "not valid" in images.add({"image/png": value})
    assert images.take() == ([], b"")


def test_images_are_limited() -> None:
    images = Images()
    notes = [images.add({"image/png": b"x"}) for _ in range(cell_protocol.MAX_IMAGES + 2)]
    assert [bool(note) for note in notes] == [False] * cell_protocol.MAX_IMAGES + [True, True]
    assert images.take()[1] == b"x" * cell_protocol.MAX_IMAGES
    assert images.add({"image/png": bytes(cell_protocol.MAX_IMAGE_BYTES)}) == ""
    assert "8 MB" in images.add({"image/png": b"x"})

"""Replaces images in requests by parts that stand for them, for engines that support images.

The four APIs encode images in different ways. Only base64 is accepted: a node may have no network, and the content of a
URL may change. Other media are left unchanged, and refused when the request is parsed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from workers.policy.gateway.dialects.left_out_media import CONTENT, CONVERSATION, GOOGLE_MEDIA, RESULTS
from workers.policy.gateway.dialects.model_api import BadRequest
from workers.policy.message_images import Picture, PicturePart

MAX_IMAGE_BYTES = 8_000_000
"""Maximum bytes of one image."""
MAX_IMAGES = 100
"""Maximum number of images of one request, repetitions included."""
MAX_HELD_BYTES = 64_000_000
"""Maximum bytes of all images of a rollout, each counted once."""

_BY_URL = "must be a data: URL with base64: a node may have no network, and the content of a URL may change"
_URLS = ("image_url", "input_image")


class RequestPictures:
    """The images of one rollout's requests, each held once."""

    def __init__(self) -> None:
        self._held: dict[str, Picture] = {}

    def put_into(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request of any API with a PicturePart in place of each image.

        Raises BadRequest, with the field's path, for an unsupported image.
        """
        reader = _Reader(self)
        return {name: reader.read(value, name) if name in CONVERSATION else value for name, value in body.items()}

    def part(self, data: bytes, where: str) -> PicturePart:
        """Return the part for an image. Raises BadRequest for bytes that are not an image, or too many."""
        if len(data) > MAX_IMAGE_BYTES:
            raise BadRequest(f"an image has {len(data)} bytes, more than {MAX_IMAGE_BYTES}", where)
        picture = Picture.of(data)
        if picture is None:
            raise BadRequest("an image must be PNG, JPEG, WebP or GIF", where)
        if picture.sha256 not in self._held:
            n_held = sum(len(each.data) for each in list(self._held.values()))
            if n_held + len(data) > MAX_HELD_BYTES:
                raise BadRequest(f"the images of the rollout have more than {MAX_HELD_BYTES} bytes in all", where)
        return PicturePart(self._held.setdefault(picture.sha256, picture))


class _Reader:
    """Collects the images of one request."""

    def __init__(self, pictures: RequestPictures) -> None:
        self._pictures = pictures
        self._n_images = 0

    def read(self, value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [self.read(each, f"{where}[{number}]") for number, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        text = _base64_of(value, where)
        if text is not None:
            return self._part(text, where)
        return {
            name: self.read(each, f"{where}.{name}") if name in CONTENT or name in RESULTS else each
            for name, each in value.items()
        }

    def _part(self, text: str, where: str) -> PicturePart:
        self._n_images += 1
        if self._n_images > MAX_IMAGES:
            raise BadRequest(f"a request may have at most {MAX_IMAGES} images", where)
        # Google's clients use the URL-safe alphabet.
        plain = text.translate(_STANDARD).rstrip("=")
        if len(plain) > MAX_IMAGE_BYTES * 4 // 3 + 4:
            raise BadRequest(f"an image may have at most {MAX_IMAGE_BYTES} bytes", where)
        try:
            data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest("an image's base64 is invalid", where) from None
        return self._pictures.part(data, where)


_STANDARD = str.maketrans("-_", "+/")


def _base64_of(part: Mapping[str, Any], where: str) -> str | None:
    """Return the base64 of an image in any API's form; None if the part is not an image. Raises BadRequest."""
    kind = part.get("type")
    if kind in _URLS:
        given = part.get("image_url")
        return _of_url(given.get("url") if isinstance(given, dict) else given, where)
    if kind == "image":
        source = part.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            raise BadRequest(
                f"an image {_BY_URL}" if _is_url(source) else "an image must have base64", f"{where}.source"
            )
        return _text(source.get("data"), f"{where}.source.data")
    for name in GOOGLE_MEDIA:
        media = part.get(name)
        if isinstance(media, dict) and _mime_type(media).startswith("image/"):
            if "data" not in media:
                raise BadRequest(f"an image {_BY_URL}", f"{where}.{name}")
            return _text(media["data"], f"{where}.{name}.data")
    return None


def _is_url(source: Any) -> bool:
    return isinstance(source, dict) and source.get("type") == "url"


def _mime_type(media: Mapping[str, Any]) -> str:
    kind = media.get("mimeType", media.get("mime_type"))
    return kind if isinstance(kind, str) else ""


def _of_url(url: Any, where: str) -> str:
    head, comma, text = _text(url, f"{where}.image_url").partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise BadRequest(f"an image {_BY_URL}", f"{where}.image_url")
    return text


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequest("an image must be given as base64", where)
    return value

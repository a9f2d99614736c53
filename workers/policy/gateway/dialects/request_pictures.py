"""Images and other media in requests: replaced by parts that stand for them, or by a line of text, by the batch's rule.

The four APIs encode images in different ways. Only base64 is accepted: a node may have no network, and the content of a
URL may change. Without the rule for text, other media are left unchanged, and refused when the request is parsed. Text
documents are kept. The arguments of tool calls are not examined.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

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
_STANDARD = str.maketrans("-_", "+/")
_TEXT_KINDS = {
    **dict.fromkeys(("image_url", "image", "input_audio", "audio_url", "video_url", "file", "document"), "text"),
    **dict.fromkeys(("input_image", "input_file", "input_video"), "input_text"),
}
GOOGLE_MEDIA = ("inlineData", "inline_data", "fileData", "file_data")
CONVERSATION = frozenset(
    {
        *("messages", "input", "contents", "system"),
        *("systemInstruction", "system_instruction", "generateContentRequest", "generate_content_request"),
    }
)
CONTENT = frozenset({"content", "parts", "output", "contents", "systemInstruction", "system_instruction"})
"""The fields that may have parts, in a message, a tool result or a nested request."""
RESULTS = ("functionResponse", "function_response")
_LEFT_OUT = "[media left out]"


class RequestPictures:
    """The images of one rollout's requests, each held once."""

    def __init__(self) -> None:
        self._held: dict[str, Picture] = {}

    def put_into(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request with a PicturePart in place of each image. Raises BadRequest, with the field's path."""
        reader = _Reader(self)
        return {name: reader.read(value, name) if name in CONVERSATION else value for name, value in body.items()}

    def part(self, data: bytes, path: str) -> PicturePart:
        """Return the part for an image. Raises BadRequest for bytes that are not an image, or too many."""
        if len(data) > MAX_IMAGE_BYTES:
            raise BadRequest(f"an image has {len(data)} bytes, more than {MAX_IMAGE_BYTES}", path)
        picture = Picture.of(data)
        if picture is None:
            raise BadRequest("an image must be PNG, JPEG, WebP or GIF", path)
        if picture.sha256 not in self._held:
            n_held = sum(len(each.data) for each in list(self._held.values()))
            if n_held + len(data) > MAX_HELD_BYTES:
                raise BadRequest(f"the images of the rollout have more than {MAX_HELD_BYTES} bytes in all", path)
        return PicturePart(self._held.setdefault(picture.sha256, picture))


class _Reader:
    def __init__(self, pictures: RequestPictures) -> None:
        self._pictures = pictures
        self._n_images = 0

    def read(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self.read(each, f"{path}[{number}]") for number, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        text = _base64_of(value, path)
        if text is not None:
            return self._part(text, path)
        return {
            name: self.read(each, f"{path}.{name}") if name in CONTENT or name in RESULTS else each
            for name, each in value.items()
        }

    def _part(self, text: str, path: str) -> PicturePart:
        self._n_images += 1
        if self._n_images > MAX_IMAGES:
            raise BadRequest(f"a request may have at most {MAX_IMAGES} images", path)
        # Google's clients use the URL-safe alphabet.
        plain = text.translate(_STANDARD).rstrip("=")
        if len(plain) > MAX_IMAGE_BYTES * 4 // 3 + 4:
            raise BadRequest(f"an image may have at most {MAX_IMAGE_BYTES} bytes", path)
        try:
            data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest("an image's base64 is invalid", path) from None
        return self._pictures.part(data, path)


def _base64_of(part: Mapping[str, Any], path: str) -> str | None:
    """Return the base64 of an image in any API's form; None if the part is not an image. Raises BadRequest."""
    kind = part.get("type")
    if kind in _URLS:
        image_url = part.get("image_url")
        return _of_url(image_url.get("url") if isinstance(image_url, dict) else image_url, path)
    if kind == "image":
        source = part.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            is_url = isinstance(source, dict) and source.get("type") == "url"
            raise BadRequest(f"an image {_BY_URL}" if is_url else "an image must have base64", f"{path}.source")
        return _text(source.get("data"), f"{path}.source.data")
    for name in GOOGLE_MEDIA:
        media = part.get(name)
        if isinstance(media, dict) and _mime_type(media).startswith("image/"):
            if "data" not in media:
                raise BadRequest(f"an image {_BY_URL}", f"{path}.{name}")
            return _text(media["data"], f"{path}.{name}.data")
    return None


def _mime_type(media: Mapping[str, Any]) -> str:
    kind = media.get("mimeType", media.get("mime_type"))
    return kind if isinstance(kind, str) else ""


def _of_url(url: Any, path: str) -> str:
    head, comma, text = _text(url, f"{path}.image_url").partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise BadRequest(f"an image {_BY_URL}", f"{path}.image_url")
    return text


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise BadRequest("an image must be given as base64", path)
    return value


def without_media(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a text in place of each part that is not text."""
    return {name: _left_out(value) if name in CONVERSATION else value for name, value in body.items()}


def _left_out(value: Any) -> Any:
    if isinstance(value, list):
        return [_left_out(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TEXT_KINDS:
        name = kind.removeprefix("input_").removesuffix("_url")
        return {"type": _TEXT_KINDS[kind], "text": _text_of(value) or f"[{name} left out]"}
    if any(name in value for name in GOOGLE_MEDIA):
        return {"text": _LEFT_OUT}
    return {
        name: _result(each) if name in RESULTS else (_left_out(each) if name in CONTENT else each)
        for name, each in value.items()
    }


def _text_of(document: Mapping[str, Any]) -> str:
    """Return the text of a document of Anthropic's API; empty if it is not a text document."""
    source = document.get("source")
    if document["type"] != "document" or not isinstance(source, dict):
        return ""
    if source.get("type") == "text":
        texts = [source.get("data")]
    else:
        content = source.get("content") if source.get("type") == "content" else None
        parts = _left_out([{"type": "text", "text": content}] if isinstance(content, str) else content)
        texts = [each.get("text") for each in parts if isinstance(each, dict)] if isinstance(parts, list) else []
    shown = [each for each in (document.get("title"), document.get("context"), *texts) if isinstance(each, str)]
    return "\n".join(shown) if texts else ""


def _result(value: Any) -> Any:
    """Return a function result of Google's API, with a text in place of the media beside it."""
    if not isinstance(value, dict) or not value.get("parts"):
        return value
    response = value.get("response")
    shown = dict(response) if isinstance(response, dict) else {} if response is None else {"result": response}
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        shown = dict.fromkeys(shown, f"{only}\n{_LEFT_OUT}")
    else:
        shown["media"] = _LEFT_OUT
    return {**{name: each for name, each in value.items() if name != "parts"}, "response": shown}

"""Images in messages: a part represents an image by its digest, and is replaced by the bytes when sent to an engine.

The JSON of a part does not contain the image, so records, comparisons and counts stay small. The image is an attribute
of the part. A copy without it is refused: no engine gets a conversation with an image missing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from farm.records.trajectory import Message
from workers.plugins.interfaces import Artefact
from workers.policy.generation import EngineRefused

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartImageParam

Content: TypeAlias = str | list[dict[str, Any]]
"""The content of a message: a text, or parts of text and images."""

IMAGE = "image"
"""The type of a part that represents an image."""

_MEDIA = frozenset(
    {IMAGE, *("image_url", "input_image", "input_audio", "audio_url", "audio", "video_url", "video", "file")}
)

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True, slots=True)
class Picture:
    """The bytes of an image, its media type, and its SHA-256 as 64 hexadecimal digits."""

    sha256: str
    media_type: str
    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Picture | None:
        """Return the image with these bytes, identified by its first bytes; None if it is none of MEDIA_TYPES."""
        media_type = _media_type(data)
        return cls(hashlib.sha256(data).hexdigest(), media_type, data) if media_type else None

    @property
    def artefact(self) -> Artefact:
        """The image as an artefact of its rollout, named by its digest."""
        return Artefact(f"{self.sha256}.{self.media_type.partition('/')[2]}", self.media_type, self.data)

    @property
    def url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


class PicturePart(dict[str, Any]):
    """A message part that represents an image: `{"type": "image", "sha256", "media_type", "n_bytes"}`."""

    def __init__(self, picture: Picture) -> None:
        super().__init__(type=IMAGE, sha256=picture.sha256, media_type=picture.media_type, n_bytes=len(picture.data))
        self.picture = picture

    def __reduce__(self) -> tuple[type[PicturePart], tuple[Picture]]:
        """Copy and pickle it with its image."""
        return PicturePart, (self.picture,)


def parts_of(messages: Sequence[Message]) -> Iterator[PicturePart]:
    """Yield the parts that represent images, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, PicturePart))


def digests_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the digests of a conversation's images in order, repetitions included."""
    return tuple(part.picture.sha256 for part in parts_of(messages))


def media_in(messages: Sequence[Message]) -> str:
    """Return the type of a conversation's first image or other medium; empty if it has none."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping))
    return next((str(part["type"]) for part in parts if part.get("type") in _MEDIA), "")


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the images embedded as in OpenAI's API. Raises EngineRefused for a lost image."""
    return [
        {**message, "content": [_sent(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _sent(part: Any) -> Any:
    if isinstance(part, PicturePart):
        image: ChatCompletionContentPartImageParam = {"type": "image_url", "image_url": {"url": part.picture.url}}
        return image
    if isinstance(part, Mapping) and part.get("type") == IMAGE:
        raise EngineRefused(
            f"image {str(part.get('sha256'))[:12]} of a message has no bytes: pass the parts of messages on unchanged"
        )
    return part


def joined(contents: Sequence[Content], join: str) -> Content:
    """Return several contents as one: adjacent texts are joined by `join`, images keep their positions."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and parts[-1]["type"] == part["type"] == "text":
                parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}{join}{part['text']}"}
            else:
                parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return join.join(part["text"] for part in parts)
    return parts


def _media_type(data: bytes) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""

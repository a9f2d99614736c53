"""Images built from a Dockerfile instead of images that cannot be pulled. The choice is recorded.

A rollout that ran in one image must not be evaluated in the other, so a choice is valid as long as the built image
exists.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.dockerfile_source import PREFIX
from workers.sandboxes.images.fingerprints import fingerprint
from workers.sandboxes.images.image_cache import images, stands, write
from workers.sandboxes.remove_tree import remove

log = logging.getLogger(__name__)

_CHARS = 300


@dataclass(frozen=True, slots=True)
class BuiltInstead:
    """The choice for one image and one build context: the `key` of the built image, and the reason for it."""

    key: str
    reason: str


def built_instead(name: str, fallback: str) -> BuiltInstead | None:
    """Return the valid choice in this home; None if there is none. Raises ImageError for an unreadable context."""
    with suppress(OSError, ValueError, TypeError):
        result = BuiltInstead(**json.loads(_note(name, fallback).read_text()))
        return result if stands(images() / result.key) else None
    return None


def choose_fallback(name: str, fallback: str, key: str, error: ImageError) -> BuiltInstead:
    """Record and log that `fallback`, whose content is `key`, replaces `name`. Raises OSError."""
    why = (error.lines or [error.message])[-1]
    result = BuiltInstead(key, f"{name} could not be pulled ({why[:_CHARS]}): its Dockerfile was built instead")
    note = _note(name, fallback)
    note.parent.mkdir(parents=True, exist_ok=True)
    write(note, json.dumps(asdict(result)))
    log.warning("%s", result.reason)
    return result


def forget_fallbacks(name: str) -> None:
    """Forget all choices for an image, because it is available."""
    remove(_folder(name))


def _note(name: str, fallback: str) -> Path:
    try:
        content = fingerprint(Path(fallback.removeprefix(PREFIX).partition("#")[0]))
    except OSError as error:
        raise ImageError(f"{fallback}, from which an image is built, cannot be read: {error}") from error
    return _folder(name) / digest(content, fallback.partition("#")[2])


def _folder(name: str) -> Path:
    return images() / "built_instead" / digest(name)

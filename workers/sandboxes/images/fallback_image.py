"""Images that are built of a Dockerfile instead of those that cannot be pulled: noted, so that the choice holds.

A rollout that was played in the one must not be scored in the other, so a choice stands as long as what was built does.
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
    """The choice for one image and one build context: the `key` of what was built, and why the image was not had."""

    key: str
    reason: str


def built_instead(name: str, fallback: str) -> BuiltInstead | None:
    """Return the choice that stands in this home; None if there is none. ImageError for an unreadable context."""
    with suppress(OSError, ValueError, TypeError):
        result = BuiltInstead(**json.loads(_note(name, fallback).read_text()))
        return result if stands(images() / result.key) else None
    return None


def choose_fallback(name: str, fallback: str, key: str, error: ImageError) -> BuiltInstead:
    """Note and log that `fallback`, whose content is `key`, is used where `name` is meant. OSError."""
    why = (error.lines or [error.message])[-1]
    result = BuiltInstead(key, f"{name} could not be pulled ({why[:_CHARS]}): its Dockerfile was built instead")
    note = _note(name, fallback)
    note.parent.mkdir(parents=True, exist_ok=True)
    write(note, json.dumps(asdict(result)))
    log.warning("%s", result.reason)
    return result


def forget_fallbacks(name: str) -> None:
    """Forget all choices for an image, as it can be had."""
    remove(_folder(name))


def _note(name: str, fallback: str) -> Path:
    try:
        content = fingerprint(Path(fallback.removeprefix(PREFIX).partition("#")[0]))
    except OSError as error:
        raise ImageError(f"{fallback}, of which an image is built, cannot be read: {error}") from error
    return _folder(name) / digest(content, fallback.partition("#")[2])


def _folder(name: str) -> Path:
    return images() / "built_instead" / digest(name)

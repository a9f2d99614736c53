"""The image `scratch` without files; and detection of images built on it that have no shell yet."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import ClassVar

from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.image_cache import ROOT, cached
from workers.sandboxes.images.layered_image import Image

_SHELLS = tuple(f"{folder}/bash" for folder in ("bin", "usr/bin", "usr/local/bin"))


class EmptySource:
    """See `workers.sandboxes.images.image_cache.ImageSource`."""

    is_built: ClassVar[bool] = False
    is_whole: ClassVar[bool] = True
    reference: ClassVar[str] = "scratch"

    def key(self) -> str:
        return digest("empty")

    def make(self, folder: Path) -> None:
        (folder / ROOT).mkdir()


def empty_image() -> Image:
    """Return the image without files. Blocks."""
    return Image(cached(EmptySource()))


def begins_empty(image: Image) -> bool:
    """Return whether an image consists only of its layers, without a root file system below them."""
    return image.folder.parent.name == EmptySource().key()


def is_bare(image: Image) -> bool:
    """Return whether an image based on `scratch` has no bash, which every sandbox of a policy needs."""
    return begins_empty(image) and not any(_has(image, path) for path in _SHELLS)


def _has(image: Image, path: str) -> bool:
    for folder in image.lower:
        try:
            # a deleted file is a device in the layer that deleted it
            return not stat.S_ISCHR(Path(folder, path).lstat().st_mode)
        except OSError:
            continue
    return False

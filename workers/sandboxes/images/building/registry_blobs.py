"""Blobs of registries, which images share: each is fetched once per node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.sandboxes.images.runtime import own_folder
from workers.sandboxes.sandbox_user import give

LAYOUT = "cache/blob"
"""The OCI layout in the runtime's cache folder."""
_BLOBS = f"{LAYOUT}/blobs/sha256"
_NAME = re.compile(r"[0-9a-f]{64}")


@contextmanager
def shared_blobs(place: Path) -> Iterator[Path]:
    """Yield a cache folder for one build in a work folder: it has all blobs of the node, and gives it the new ones.

    Its layout lists only the image of this build. A layout of several images does not say which name has which image.
    """
    shared, folder = own_folder() / _BLOBS, place / "blobs"
    own = folder / _BLOBS
    for each in (shared, own):
        each.mkdir(parents=True, exist_ok=True)
    _link_all(shared, own)
    give(folder)
    try:
        yield folder
    finally:
        # also of a build that failed, which is perhaps retried
        _link_all(own, shared)


def _link_all(source: Path, target: Path) -> None:
    for blob in source.iterdir():
        # another build may have added or removed it at the same time; unfinished ones have other names
        with suppress(OSError):
            if _NAME.fullmatch(blob.name):
                os.link(blob, target / blob.name)

"""The lowest layer of a sandbox: a folder with a root file system, from whatever a `SandboxSpec.image` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.images.host_image import REFERENCE, HostSource, binds
from workers.sandboxes.images.image_cache import cached
from workers.sandboxes.images.image_sources import FolderSource, source_of
from workers.sandboxes.images.image_variables import read_variables
from workers.sandboxes.images.root_folders import has_bash

HOST = REFERENCE


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system, and the folders of the host bound over it, read-only: pairs of source and target."""

    folder: Path
    binds: tuple[tuple[str, str], ...] = ()
    system: bool = False
    """True if its /usr is the host's, and with it the host's Python and libraries."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables set for its programs: `ENV` of a Dockerfile, `%environment` of a definition; PATH among them."""


def image(name: str, values: Mapping[str, str] | None = None, *, retry: bool = False, relock: bool = False) -> Image:
    """Find or make an image on this node; `values` are those of a template. Blocks; the first time for seconds.

    Raises ImageError if it is missing or cannot be built, SandboxError if there is nothing to build it with.
    A folder that belongs to the sandbox user is used where it is, all others are in the cache. `retry` and `relock` as
    of `cached`.
    """
    if name == HOST:
        return Image(cached(HostSource()), binds(), system=True)
    source = source_of(name, values or {})
    if isinstance(source, FolderSource) and source.usable:
        if not has_bash(source.path):
            raise ImageError(f"image {name}: the folder has no root file system with a bash in it")
        return Image(source.path)
    root = cached(source, retry=retry, relock=relock)
    return Image(root, variables=read_variables(root.parent))

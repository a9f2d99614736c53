"""The lowest layer of a sandbox: a folder with a root file system, from whatever a `SandboxSpec.image` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.host_image import REFERENCE, HostImage, binds
from workers.sandboxes.image_cache import cached
from workers.sandboxes.image_sources import Folder, source_of
from workers.sandboxes.image_variables import read_variables
from workers.sandboxes.root_folders import has_bash

HOST = REFERENCE


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system, and what of the host is bound over it, read-only: pairs of source and target."""

    folder: Path
    binds: tuple[tuple[str, str], ...] = ()
    system: bool = False
    """Whether its /usr is the host's, and with it the host's Python and libraries."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What it sets for its programs: `ENV` of a Dockerfile, `%environment` of a definition; PATH among them."""


def image(name: str, values: Mapping[str, str] | None = None, *, retry: bool = False, relock: bool = False) -> Image:
    """Find or make an image on this node; `values` are those of a template. Blocks; the first time for seconds.

    Raises ImageError if it is missing or cannot be built, SandboxError if there is nothing to build it with.
    A folder that belongs to the sandbox user is used where it is, all others are in the cache. `retry` and `relock` as
    of `cached`.
    """
    if name == HOST:
        return Image(cached(HostImage()), binds(), system=True)
    source = source_of(name, values or {})
    if isinstance(source, Folder) and source.usable:
        if not has_bash(source.path):
            raise ImageError(f"image {name}: the folder has no root file system with a bash in it")
        return Image(source.path)
    root = cached(source, retry=retry, relock=relock)
    return Image(root, variables=read_variables(root.parent))

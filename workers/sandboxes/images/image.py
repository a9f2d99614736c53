"""The lowest layers of a sandbox: folders with a root file system, from the image of a `SandboxSpec.image`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from farm.errors import ImageError, SandboxError
from farm.settings import settings
from workers.sandboxes.images.building.image_variables import read_variables
from workers.sandboxes.images.building.oci_config import read_config
from workers.sandboxes.images.dockerfile.build_place import StartBuild
from workers.sandboxes.images.dockerfile.dockerfile_source import PREFIX, DockerfileSource
from workers.sandboxes.images.fallback_image import built_instead, choose_fallback, forget_fallbacks
from workers.sandboxes.images.host_image import REFERENCE, HostSource, binds
from workers.sandboxes.images.image_aliases import alias_of
from workers.sandboxes.images.image_cache import ImageSource, cached, entry_of
from workers.sandboxes.images.image_sources import FolderSource, RegistrySource, source_of
from workers.sandboxes.images.layered_image import Image as Image
from workers.sandboxes.images.layered_image import read_layers
from workers.sandboxes.images.root_folders import has_bash
from workers.sandboxes.images.runtime import program

HOST = REFERENCE
CACHED = "cached:"
"""Prefix of the name of an image's content, for an image that was built before."""
_MAX_ALIASES = 8


def image(
    name: str,
    values: Mapping[str, str] | None = None,
    *,
    fallback: str = "",
    retry: bool = False,
    relock: bool = False,
    start: StartBuild | None = None,
) -> Image:
    """Find or create an image on this node. `values` are those of a template or the build arguments of a Dockerfile.

    `fallback` as in `SandboxSpec.fallback_image`; the notes of the image's configuration tell that it was used, and
    why.

    Blocks, the first time for seconds. Raises ImageError if the image is missing or cannot be built, SandboxError if
    the node lacks a tool to build it. A folder that belongs to the sandbox user is used in place; all other images are
    in the cache. `retry` and `relock` as in `cached`; `start` starts the sandboxes in which a Dockerfile is built.
    """
    name = _meant(name)
    if name == HOST:
        return Image(cached(HostSource()), binds(), system=True)
    if name.startswith(CACHED):
        return _of_entry(entry_of(name.removeprefix(CACHED)))
    source: ImageSource
    if name.startswith(PREFIX):
        bases = partial(base_image, retry=retry, start=start)
        source = DockerfileSource.of(name, values or {}, bases, start, retry)
    else:
        source = source_of(name, values or {})
    if isinstance(source, FolderSource) and source.usable:
        if not has_bash(source.path):
            raise ImageError(f"image {name}: the folder has no root file system with a bash in it")
        return Image(source.path)
    if fallback and isinstance(source, RegistrySource):
        return _pulled_or_built(source, fallback, retry=retry, relock=relock, start=start)
    result = _of_entry(cached(source, retry=retry, relock=relock))
    if retry and isinstance(source, RegistrySource):
        forget_fallbacks(source.reference)
    return result


def _pulled_or_built(
    source: RegistrySource, fallback: str, *, retry: bool, relock: bool, start: StartBuild | None
) -> Image:
    """Return an image of a registry, or the fallback if it cannot be pulled."""
    name = source.reference
    chosen = None if retry else built_instead(name, fallback)
    if chosen is not None:
        return _noted(image(fallback, start=start), chosen.reason)
    try:
        return image(name, retry=retry, relock=relock)
    except SandboxError as error:
        failed = error if isinstance(error, ImageError) else ImageError(str(error))
        if failed is not error and program() is not None:
            raise
        try:
            built = image(fallback, retry=retry, relock=relock, start=start)
        except ImageError as other:
            both = f"{failed.message}; nor could its Dockerfile be built instead: {other.message}"
            lines = other.lines or failed.lines
            raise ImageError(both, lines, retryable=failed.retryable or other.retryable) from other
        return _noted(built, choose_fallback(name, fallback, built.key, failed).reason)


def _noted(result: Image, note: str) -> Image:
    return replace(result, config=replace(result.config, notes=(note, *result.config.notes)))


def _of_entry(root: Path) -> Image:
    return read_layers(root) or Image(root, variables=read_variables(root.parent), config=read_config(root.parent))


def fallback_note(name: str, fallback: str) -> str:
    """Return why the fallback of an image is used on this node; empty if it is not. Raises ImageError. Blocks."""
    meant = _meant(name)
    if not fallback or not isinstance(source_of(meant, {}), RegistrySource):
        return ""
    chosen = built_instead(meant, fallback)
    return chosen.reason if chosen else ""


def _meant(name: str) -> str:
    for _ in range(_MAX_ALIASES):
        if (meant := _alias(name)) is None:
            break
        name = meant
    return name


def _alias(name: str) -> str | None:
    return None if name == HOST or name[:1] == "/" or name.startswith((CACHED, PREFIX)) else alias_of(name)


def base_image(name: str, *, retry: bool = False, start: StartBuild | None = None) -> Image | None:
    """Return the base image of a Dockerfile by name, from the table of names, or a registry if builds have network.

    None if there is no such image and builds have no network.
    """
    if name == HOST or name.startswith(("/", CACHED)) or alias_of(name) is not None:
        return image(name, retry=retry, start=start)
    if settings().build_network:
        return image(f"docker://{name}", retry=retry, start=start)
    return None

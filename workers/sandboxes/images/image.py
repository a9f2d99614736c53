"""The lowest layers of a sandbox: folders with a root file system, from the image of a `SandboxSpec.image`.

Names of base images, such as `ubuntu:24.04`, stand for images by a table in the farm's home. An image that cannot be
pulled may be built from a Dockerfile instead. The choice is recorded: a rollout that ran in one image must not be
evaluated in the other, so a choice is valid as long as the built image exists.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import ImageError, SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.oci_layouts import read_config, read_variables
from workers.sandboxes.images.content_store import digest, fingerprint, write
from workers.sandboxes.images.dockerfile.dockerfile_source import PREFIX, DockerfileSource
from workers.sandboxes.images.image_cache import ImageSource, cached, entry_of, has_bash, stands
from workers.sandboxes.images.image_sources import HOST, FolderSource, HostSource, RegistrySource, host_binds, source_of
from workers.sandboxes.images.layered_image import Image as Image
from workers.sandboxes.images.layered_image import read_layers
from workers.sandboxes.images.runtime import program
from workers.sandboxes.remove_tree import remove

if TYPE_CHECKING:
    from workers.sandboxes.build_sandbox import StartBuild

CACHED = "cached:"
"""Prefix of the name of an image's content, for an image that was built before."""
_MAX_ALIASES = 8

log = logging.getLogger(__name__)

_REASON_CHARS = 300

_OWN_REGISTRY = ("docker.io/library/", "index.docker.io/library/", "library/", "docker.io/")


def image(
    config: SandboxConfig,
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
    name = _meant(config, name)
    if name == HOST:
        return Image(cached(config, HostSource(config)), host_binds(), system=True)
    if name.startswith(CACHED):
        return _of_entry(entry_of(config, name.removeprefix(CACHED)))
    source: ImageSource
    if name.startswith(PREFIX):
        bases = partial(base_image, config, retry=retry, start=start)
        source = DockerfileSource.of(config, name, values or {}, bases, start, retry)
    else:
        source = source_of(config, name, values or {})
    if isinstance(source, FolderSource) and source.usable:
        if not has_bash(source.path):
            raise ImageError(f"image {name}: the folder has no root file system with a bash in it")
        return Image(source.path)
    if fallback and isinstance(source, RegistrySource):
        return _pulled_or_built(config, source, fallback, retry=retry, relock=relock, start=start)
    cached_image = _of_entry(cached(config, source, retry=retry, relock=relock))
    if retry and isinstance(source, RegistrySource):
        # it is available: all choices of a fallback for it are void
        remove(_choices_of(config, source.reference))
    return cached_image


def _pulled_or_built(
    config: SandboxConfig, source: RegistrySource, fallback: str, *, retry: bool, relock: bool, start: StartBuild | None
) -> Image:
    """Return an image of a registry, or the fallback if it cannot be pulled."""
    name = source.reference
    chosen = None if retry else built_instead(config, name, fallback)
    if chosen is not None:
        return _noted(image(config, fallback, start=start), chosen.reason)
    try:
        return image(config, name, retry=retry, relock=relock)
    except SandboxError as error:
        failed = error if isinstance(error, ImageError) else ImageError(str(error))
        if failed is not error and program(config) is not None:
            raise
        try:
            built = image(config, fallback, retry=retry, relock=relock, start=start)
        except ImageError as other:
            both = f"{failed.message}; nor could its Dockerfile be built instead: {other.message}"
            lines = other.lines or failed.lines
            raise ImageError(both, lines, retryable=failed.retryable or other.retryable) from other
        return _noted(built, choose_fallback(config, name, fallback, built.key(config), failed).reason)


def _noted(built: Image, note: str) -> Image:
    return replace(built, config=replace(built.config, notes=(note, *built.config.notes)))


def _of_entry(root: Path) -> Image:
    return read_layers(root) or Image(root, variables=read_variables(root.parent), config=read_config(root.parent))


def fallback_note(config: SandboxConfig, name: str, fallback: str) -> str:
    """Return why the fallback of an image is used on this node; empty if it is not. Raises ImageError. Blocks."""
    meant = _meant(config, name)
    if not fallback or not isinstance(source_of(config, meant, {}), RegistrySource):
        return ""
    chosen = built_instead(config, meant, fallback)
    return chosen.reason if chosen else ""


def _meant(config: SandboxConfig, name: str) -> str:
    for _ in range(_MAX_ALIASES):
        if name == HOST or name.startswith(("/", CACHED, PREFIX)) or (meant := alias_of(config, name)) is None:
            break
        name = meant
    return name


def base_image(
    config: SandboxConfig, name: str, *, retry: bool = False, start: StartBuild | None = None
) -> Image | None:
    """Return the base image of a Dockerfile by name, from the table of names, or a registry if builds have network.

    None if there is no such image and builds have no network.
    """
    if name == HOST or name.startswith(("/", CACHED)) or alias_of(config, name) is not None:
        return image(config, name, retry=retry, start=start)
    if config.build_network:
        return image(config, f"docker://{name}", retry=retry, start=start)
    return None


@dataclass(frozen=True, slots=True)
class BuiltInstead:
    """The choice for one image and one build context: the `key` of the built image, and the reason for it."""

    key: str
    reason: str


def built_instead(config: SandboxConfig, name: str, fallback: str) -> BuiltInstead | None:
    """Return the valid choice in this home; None if there is none. Raises ImageError for an unreadable context."""
    with suppress(OSError, ValueError, TypeError):
        choice = BuiltInstead(**json.loads(_choice_file(config, name, fallback).read_text()))
        return choice if stands(config.images_folder / choice.key) else None
    return None


def choose_fallback(config: SandboxConfig, name: str, fallback: str, key: str, error: ImageError) -> BuiltInstead:
    """Record and log that `fallback`, whose content is `key`, replaces `name`. Raises OSError."""
    why = (error.lines or [error.message])[-1]
    choice = BuiltInstead(key, f"{name} could not be pulled ({why[:_REASON_CHARS]}): its Dockerfile was built instead")
    note = _choice_file(config, name, fallback)
    note.parent.mkdir(parents=True, exist_ok=True)
    write(note, json.dumps(asdict(choice)))
    log.warning("%s", choice.reason)
    return choice


def _choice_file(config: SandboxConfig, name: str, fallback: str) -> Path:
    try:
        content = fingerprint(Path(fallback.removeprefix(PREFIX).partition("#")[0]), config.digests_folder)
    except OSError as error:
        raise ImageError(f"{fallback}, from which an image is built, cannot be read: {error}") from error
    return _choices_of(config, name) / digest(content, fallback.partition("#")[2])


def _choices_of(config: SandboxConfig, name: str) -> Path:
    return config.images_folder / "built_instead" / digest(name)


def _alias_table(config: SandboxConfig) -> Path:
    return config.home / "image_aliases.json"


def aliases(config: SandboxConfig) -> dict[str, str]:
    """Return the image of each name, in the form of a SandboxSpec. Raises ImageError if the table is broken."""
    try:
        return dict(json.loads(_alias_table(config).read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ImageError(f"{_alias_table(config)}, the names of base images, cannot be read: {error}") from error


def set_alias(config: SandboxConfig, name: str, reference: str) -> None:
    """Let a name stand for an image from now on."""
    _write_aliases(config, {**aliases(config), plain_name(name): reference})


def remove_alias(config: SandboxConfig, name: str) -> bool:
    """Remove a name; return whether it existed."""
    table = aliases(config)
    existed = table.pop(plain_name(name), None) is not None
    _write_aliases(config, table)
    return existed


def alias_of(config: SandboxConfig, name: str) -> str | None:
    """Return the image that a name stands for; None if it is not in the table. A digest after `@` precedes the tag."""
    table = aliases(config)
    return next((table[each] for each in (plain_name(name), plain_name(name.partition("@")[0])) if each in table), None)


def plain_name(name: str) -> str:
    """Return a name without the default registry, and with the default tag if it has none."""
    name = name.removeprefix("docker://")
    for prefix in _OWN_REGISTRY:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if ":" in name.rpartition("/")[2] or "@" in name:
        return name
    return f"{name}:latest"


def _write_aliases(config: SandboxConfig, table: Mapping[str, str]) -> None:
    path = _alias_table(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(dict(sorted(table.items())), indent=1) + "\n")

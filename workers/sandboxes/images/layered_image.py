"""An image as sandboxes use it: a root file system, layers over it, folders of the host bound over both."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from workers.sandboxes.images.content_store import digest
from workers.sandboxes.images.dockerfile.image_config import ImageConfig
from workers.sandboxes.images.fingerprints import fingerprint
from workers.sandboxes.images.image_cache import LAYERS, ROOT, cached, images

_KNOWN_S = 30.0
"""Seconds for which a folder outside of the cache counts as unchanged: to check all of its files takes long."""

_known: dict[Path, tuple[float, str]] = {}

_SHELLS = tuple(f"{folder}/bash" for folder in ("bin", "usr/bin", "usr/local/bin"))


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system, layers over it, and the folders of the host bound over them, read-only.

    `binds` are pairs of source and target, `layers` folders, the uppermost first.
    """

    folder: Path
    binds: tuple[tuple[str, str], ...] = ()
    system: bool = False
    """True if its /usr is the host's, and with it the host's Python and libraries."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables set for its programs: `ENV` of a Dockerfile, `%environment` of a definition; PATH among them."""
    layers: tuple[Path, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)
    """Other settings for programs: of its Dockerfile, or of an image from a registry or an archive."""
    entry: Path | None = None
    """Its own folder in the cache, if its files are those of other entries there."""

    @property
    def lower(self) -> tuple[str, ...]:
        """All its folders, the uppermost first."""
        return tuple(map(str, (*self.layers, self.folder)))

    @property
    def roots(self) -> tuple[Path, ...]:
        """The cache folders to hold while it is used, so that none of it is removed."""
        return tuple(dict.fromkeys(root for root in (self.entry, self.folder) if root is not None))

    @property
    def key(self) -> str:
        """The name of its content. Raises OSError for a folder that cannot be read. Blocks."""
        if self.entry is not None:
            return self.entry.parent.name
        if self.folder.parent.parent == images():
            return self.folder.parent.name
        now = time.monotonic()
        known_at, key = _known.get(self.folder, (-_KNOWN_S, ""))
        if now - known_at >= _KNOWN_S:
            key = digest("folder", fingerprint(self.folder))
            _known[self.folder] = (now, key)
        return key


def write_layers(image: Image, folder: Path) -> None:
    """Write the list of folders of which an image consists to its own folder in the cache."""
    fields = {
        "folder": str(image.folder),
        "binds": image.binds,
        "system": image.system,
        "variables": dict(image.variables),
        "layers": [str(layer) for layer in image.layers],
        "config": asdict(image.config),
    }
    (folder / LAYERS).write_text(json.dumps(fields))


def read_layers(entry: Path) -> Image | None:
    """Return the image that consists of other folders, from its own `KEY/root`; None if it has its own files."""
    try:
        fields = json.loads((entry.parent / LAYERS).read_text())
    except FileNotFoundError:
        return None
    return Image(
        Path(fields["folder"]),
        tuple((source, target) for source, target in fields["binds"]),
        fields["system"],
        fields["variables"],
        tuple(map(Path, fields["layers"])),
        ImageConfig.of(fields["config"]),
        entry,
    )


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

"""An image as sandboxes use it: a root file system, layers over it, folders of the host bound over both."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.images.content_store import digest, fingerprint
from workers.sandboxes.images.dockerfile.image_config import ImageConfig
from workers.sandboxes.images.image_cache import LAYERS, ROOT, cached

_KNOWN_S = 30.0
"""Seconds for which a folder outside of the cache counts as unchanged: to check all of its files takes long."""

_known: dict[Path, tuple[float, str]] = {}

_SHELLS = tuple(f"{folder}/bash" for folder in ("bin", "usr/bin", "usr/local/bin"))

_MAX_BYTES = 1_000_000
OF_USERS = ("USER", "LOGNAME", "HOME")
"""Variables that name a user."""
_ROOT = ("root", "0", "")


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

    def key(self, config: SandboxConfig) -> str:
        """Return the name of its content. Raises OSError for a folder that cannot be read. Blocks."""
        if self.entry is not None:
            return self.entry.parent.name
        if self.folder.parent.parent == config.images_folder:
            return self.folder.parent.name
        now = time.monotonic()
        known_at, key = _known.get(self.folder, (-_KNOWN_S, ""))
        if now - known_at >= _KNOWN_S:
            key = digest("folder", fingerprint(self.folder, config.digests_folder))
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


def empty_image(config: SandboxConfig) -> Image:
    """Return the image without files. Blocks."""
    return Image(cached(config, EmptySource()))


def is_bare(image: Image) -> bool:
    """Return whether an image based on `scratch` has no bash, which every sandbox of a policy needs."""
    begins_empty = image.folder.parent.name == EmptySource().key()
    return begins_empty and not any(_has(image, path) for path in _SHELLS)


def _has(image: Image, path: str) -> bool:
    for folder in image.lower:
        try:
            # a deleted file is a device in the layer that deleted it
            return not stat.S_ISCHR(Path(folder, path).lstat().st_mode)
        except OSError:
            continue
    return False


@dataclass(frozen=True, slots=True)
class ImageUser:
    """A user by number, with the environment variables that name the user, unless it is root."""

    uid: int = 0
    gid: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)


def image_user(folders: Sequence[str], user: str) -> ImageUser:
    """Return a user of an image by name or number, optionally with the number of a group after a colon.

    `folders` are its layers, the uppermost first. Raises SandboxError if the image has no such user.
    """
    name, _, group = user.partition(":")
    if name in _ROOT:
        return ImageUser()
    for line in _lines(folders):
        fields = line.split(":")
        if len(fields) >= 6 and name in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            gid = int(group if group.isdecimal() else fields[3])
            return ImageUser(int(fields[2]), gid, _named(fields[0], fields[5] or "/"))
    if name.isdecimal():
        # a container may also use a number without a name
        return ImageUser(int(name), int(group) if group.isdecimal() else 0, _named(name, "/"))
    raise SandboxError(f"image {folders[-1]} has no user {name!r} in its /etc/passwd")


def _named(name: str, home: str) -> dict[str, str]:
    return dict(zip(OF_USERS, (name, name, home), strict=True))


def _lines(folders: Sequence[str]) -> list[str]:
    for folder in folders:
        path = Path(folder, "etc/passwd")
        try:
            # a link of the image is resolved inside, not here
            if path.is_symlink() or path.stat().st_size > _MAX_BYTES:
                return []
            return path.read_text(errors="replace").splitlines()
        except OSError:
            continue
    return []

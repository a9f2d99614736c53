"""Image files of the runtime's own format (SIF; github.com/apptainer/sif, `sif.go`): their objects, and special modes.

The runtime drops set-user-ID, set-group-ID and sticky bits, because it unpacks a file as an ordinary user."""

from __future__ import annotations

import re
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from farm.errors import ImageError
from workers.config import SandboxConfig
from workers.sandboxes.images.building.builder import environment
from workers.sandboxes.images.runtime import wrapper

# the header has the position of the descriptors; each of these has its data type, whether it is used, its offset, size
# and name, and for a partition its file system and purpose
_HEADER = struct.Struct("<88xqq")
_DESCRIPTOR = struct.Struct("<i?12xqq40x128sii376x")
_PARTITION, _JSON = 0x4004, 0x4006
_SQUASHFS, _SYSTEM = 1, 2
_MOST_DESCRIPTORS = 4096
_OCI_CONFIG = "oci-config.json"
_MOST_CONFIG_BYTES = 1 << 20

_LIST_S = 600.0
_LINE = re.compile(r"([-d])(.{9}) +\S+ +\d+ +\S+ +\S+ +squashfs-root/(.*)")


@dataclass(frozen=True, slots=True)
class SifObject:
    """One object: its data type, name, offset and size; `form` is a partition's file system and purpose."""

    kind: int
    name: str
    offset: int
    size: int
    form: tuple[int, int]


def system_offset(image: Path) -> int | None:
    """Return the offset of the image's file system; None if none can be listed, e.g. in an encrypted image."""
    offsets = (each.offset for each in _objects(image) if (each.kind, each.form) == (_PARTITION, (_SQUASHFS, _SYSTEM)))
    return next(offsets, None)


def oci_settings(image: Path) -> bytes | None:
    """Return the `config` of the OCI config that an image was built from, as JSON; None if it was built otherwise."""
    for each in _objects(image):
        if (each.kind, each.name) == (_JSON, _OCI_CONFIG) and 0 <= each.size <= _MOST_CONFIG_BYTES:
            with image.open("rb") as file:
                file.seek(each.offset)
                return file.read(each.size)
    return None


def _objects(image: Path) -> Iterator[SifObject]:
    with image.open("rb") as file:
        n_descriptors, start = _HEADER.unpack(file.read(_HEADER.size))
        file.seek(start)
        for _ in range(min(n_descriptors, _MOST_DESCRIPTORS)):
            read = file.read(_DESCRIPTOR.size)
            if len(read) < _DESCRIPTOR.size:
                break
            kind, used, offset, size, name, system, purpose = _DESCRIPTOR.unpack(read)
            if used:
                text = name.partition(b"\0")[0].decode(errors="replace")
                yield SifObject(kind, text, offset, size, (system, purpose))


def restore_special_modes(config: SandboxConfig, image: Path, root: Path, work_folder: Path) -> None:
    """Give files of an unpacked image file the special bits that they have in it. Raises ImageError. Blocks.

    `work_folder` belongs to the sandbox user.
    """
    offset = system_offset(image)
    if offset is None:
        return
    words = [str(wrapper(config, "unsquashfs")), "-o", str(offset), "-lln", str(image)]
    env = environment(config, work_folder)
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, errors="surrogateescape", timeout=_LIST_S)
    except subprocess.TimeoutExpired:
        raise ImageError(f"the modes in {image} could not be read within {_LIST_S:.0f} s", retryable=True) from None
    if done.returncode:
        raise ImageError(f"the modes in {image} could not be read: {done.stderr.strip()[-300:]}")
    for kind, letters, name in _listed(done.stdout):
        path = root / name
        if any(above.is_symlink() for above in path.parents if above.is_relative_to(root)):
            continue
        wanted = stat.S_IFDIR if kind == "d" else stat.S_IFREG
        mode = path.lstat().st_mode if path.exists() and not path.is_symlink() else 0
        if stat.S_IFMT(mode) == wanted:
            path.chmod(stat.S_IMODE(mode) | _special(letters))


def _listed(text: str) -> Iterator[tuple[str, str, str]]:
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match and _special(match[2]):
            yield match[1], match[2], match[3]


def _special(letters: str) -> int:
    bits = zip((2, 5, 8), (stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX), strict=True)
    return sum(bit for at, bit in bits if letters[at] in "sStT")

"""Objects in an image file of the runtime's own format (SIF; github.com/apptainer/sif, `sif.go`)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# the header has the position of the descriptors; each of these has its data type, whether it is used, its offset, size
# and name, and for a partition its file system and purpose
_HEADER = struct.Struct("<88xqq")
_DESCRIPTOR = struct.Struct("<i?12xqq40x128sii376x")
_PARTITION, _JSON = 0x4004, 0x4006
_SQUASHFS, _SYSTEM = 1, 2
_MOST_DESCRIPTORS = 4096
_OCI_CONFIG = "oci-config.json"
_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SifObject:
    """One object: its data type, name, and place in the file; `form` is a partition's file system and purpose."""

    kind: int
    name: str
    offset: int
    size: int
    form: tuple[int, int]


def system_offset(image: Path) -> int | None:
    """Return the offset of the image's file system; None if none can be listed, e.g. in an encrypted image."""
    found = (each.offset for each in _objects(image) if (each.kind, each.form) == (_PARTITION, (_SQUASHFS, _SYSTEM)))
    return next(found, None)


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

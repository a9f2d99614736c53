"""Set-user-ID, set-group-ID and sticky bits of the files in an image file (SIF).

The runtime drops them, because it unpacks the file as an ordinary user.
"""

from __future__ import annotations

import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from farm.errors import ImageError
from workers.sandboxes.images.building.builder import environment
from workers.sandboxes.images.building.sif_file import system_offset
from workers.sandboxes.images.runtime import wrapper

_LIST_S = 600.0
_LINE = re.compile(r"([-d])(.{9}) +\S+ +\d+ +\S+ +\S+ +squashfs-root/(.*)")


def restore_special_modes(image: Path, root: Path, place: Path) -> None:
    """Give files of an unpacked image file the special bits that they have in it. Raises ImageError. Blocks.

    `place` is a work folder of the sandbox user.
    """
    offset = system_offset(image)
    if offset is None:
        return
    words = [str(wrapper("unsquashfs")), "-o", str(offset), "-lln", str(image)]
    try:
        done = subprocess.run(
            words, env=environment(place), capture_output=True, text=True, errors="surrogateescape", timeout=_LIST_S
        )
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
    """Yield the kind, the letters of the mode, and the path of the files with special bits."""
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match and _special(match[2]):
            yield match[1], match[2], match[3]


def _special(letters: str) -> int:
    bits = zip((2, 5, 8), (stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX), strict=True)
    return sum(bit for at, bit in bits if letters[at] in "sStT")

"""Users of an image, as its /etc/passwd has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farm.errors import SandboxError

_MAX_BYTES = 1_000_000
_ROOT = ("root", "0", "")


def image_user(folders: Sequence[str], user: str) -> dict[str, str]:
    """Return the environment variables that name a user of an image, by its name or number; none for root.

    `folders` are its layers, the uppermost first.
    Raises SandboxError if the image has no such user.
    """
    name = user.partition(":")[0]
    if name in _ROOT:
        return {}
    for line in _lines(folders):
        fields = line.split(":")
        if len(fields) >= 6 and name in (fields[0], fields[2]):
            return {"USER": fields[0], "LOGNAME": fields[0], "HOME": fields[5] or "/"}
    if name.isdecimal():
        # a container may have a number without a name, too
        return {"USER": name, "LOGNAME": name, "HOME": "/"}
    raise SandboxError(f"image {folders[-1]} has no user {name!r} in its /etc/passwd")


def _lines(folders: Sequence[str]) -> list[str]:
    for folder in folders:
        path = Path(folder, "etc/passwd")
        try:
            # a link of the image leads where it leads inside, which is not here
            if path.is_symlink() or path.stat().st_size > _MAX_BYTES:
                return []
            return path.read_text(errors="replace").splitlines()
        except OSError:
            continue
    return []

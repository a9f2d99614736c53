"""Users of an image, as its /etc/passwd has them."""

from __future__ import annotations

from pathlib import Path

from farm.errors import SandboxError

_MAX_BYTES = 1_000_000
_ROOT = ("root", "0", "")


def image_user(folder: str, user: str) -> dict[str, str]:
    """Return the environment variables that name a user of an image, by its name or number; none for root.

    Raises SandboxError if the image has no such user.
    """
    name = user.partition(":")[0]
    if name in _ROOT:
        return {}
    for line in _lines(Path(folder, "etc/passwd")):
        fields = line.split(":")
        if len(fields) >= 6 and name in (fields[0], fields[2]):
            return {"USER": fields[0], "LOGNAME": fields[0], "HOME": fields[5] or "/"}
    if name.isdecimal():
        # a container may have a number without a name, too
        return {"USER": name, "LOGNAME": name, "HOME": "/"}
    raise SandboxError(f"image {folder} has no user {name!r} in its /etc/passwd")


def _lines(path: Path) -> list[str]:
    try:
        # a link of the image leads where it leads inside, which is not here
        if path.is_symlink() or path.stat().st_size > _MAX_BYTES:
            return []
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []

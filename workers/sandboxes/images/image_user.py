"""Users of an image, as listed in its /etc/passwd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farm.errors import SandboxError

_MAX_BYTES = 1_000_000
OF_USERS = ("USER", "LOGNAME", "HOME")
"""Variables that name a user."""
_ROOT = ("root", "0", "")


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

# ruff: noqa: PTH101, PTH116, PTH118
"""The owner of a file as an image's author means it: an attribute of the file, as the kernel knows one user of a
sandbox; standard library only.

A file without it is root's. Overlays show the attribute through, and copy it with the file; tar streams of layers keep
it. A layer with any says so at its root. Links and what is no file or folder can have none, and are root's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias, TypedDict

    Owner: TypeAlias = tuple[int, int]

    class CopiedOwners(TypedDict):
        """Owners of copied files: of all `each`, else of each file as its source says.

        A folder whose contents are copied is `each`'s, or root's, if it is made; `whole` copies it as well.
        """

        each: Owner | None
        whole: bool


ATTRIBUTE = "user.farm.owner"
MARK = "user.farm.owners"
"""Of the root folder of a layer, some of whose files have an owner."""
ROOT = (0, 0)
_CANNOT_HAVE = {errno.ENOTSUP, errno.EPERM, errno.EACCES}
_UNCHANGED = 0xFFFFFFFF
"""No id: an order to leave what is."""


def owner_of(path: str | int) -> Owner | None:
    """Return the owner that is noted on a file, not following a link but one of /proc; None if none is."""
    return owner_at(path, follow=_follows(path))


def _follows(path: str | int) -> bool:
    return isinstance(path, int) or path.startswith("/proc/")


def owner_at(path: str | bytes | int, *, follow: bool) -> Owner | None:
    """Return the owner that is noted on a file, or on what a link leads to; None if none is."""
    try:
        uid, gid = os.getxattr(path, ATTRIBUTE, follow_symlinks=follow).split(b":")
        found = int(uid), int(gid)
    except (OSError, ValueError):
        return None
    # programs can write it themselves
    return found if all(0 <= each < _UNCHANGED for each in found) else None


def note_owner(path: str | int, uid: int, gid: int, root: str) -> None:
    """Note the owner of a file, below `root`, or of a link in /proc to one; what cannot have one stays root's. OSError.

    An open file's descriptor will do.

    `uid` and `gid` are what the kernel takes for them.
    """
    now = owner_of(path)
    old = now or ROOT
    new = (old[0] if uid == _UNCHANGED else uid, old[1] if gid == _UNCHANGED else gid)
    follow = _follows(path)
    try:
        if new == ROOT:
            if now is not None:
                os.removexattr(path, ATTRIBUTE, follow_symlinks=follow)
        elif new != now:
            os.setxattr(path, ATTRIBUTE, b"%d:%d" % new, follow_symlinks=follow)
            os.setxattr(root, MARK, b"1")
    except OSError as error:
        if error.errno not in _CANNOT_HAVE:
            raise


def owner_in(place: bytes, owner: Owner) -> Owner:
    """Return whose a new file of this path is: its maker's, but of the group of a set-group-id folder. OSError."""
    above = os.path.dirname(place)  # noqa: PTH120
    if not os.stat(above).st_mode & stat.S_ISGID:
        return owner
    return owner[0], (owner_at(above, follow=True) or ROOT)[1]


def note_folders(folders: Sequence[str], owners: CopiedOwners) -> None:
    """Note whose the folders are that a copy makes above its files. OSError."""
    uid, gid = owners["each"] or ROOT
    for folder in folders:
        note_owner(folder, uid, gid, "/")


def clear_set_id(link: str) -> None:
    """Take the set-id bits from a file, given by a link in /proc, as the kernel does at each change of owner.

    The bit of the group stays on a file that the group cannot execute, and both stay on folders.
    """
    mode = os.stat(link).st_mode
    lost = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
    if stat.S_ISREG(mode) and mode & lost:
        os.chmod(link, stat.S_IMODE(mode & ~lost))


def has_owners(folders: Iterable[str]) -> bool:
    """Return whether files of one of these layers have owners."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.getxattr(folder, MARK)
            return True
    return False


def settle(layer: str, owner: Sequence[int], lower: Sequence[str]) -> None:
    """Note whose the files of a layer are that one user's programs have written over those of other layers, `lower`.

    What is new is that user's, whatever the programs noted; what was there keeps its owner.
    """
    uid, gid = owner
    for path in _entries(layer):
        below = next((f"{each}/{path}" for each in lower if os.path.lexists(f"{each}/{path}")), "")
        kept = (owner_of(below) or ROOT) if below else (uid, gid)
        # of the policy's making
        with contextlib.suppress(OSError):
            note_owner(os.path.join(layer, path), *kept, layer)


def _entries(layer: str) -> list[str]:
    """Return the files and folders of a layer."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(f"{layer}/{prefix}") as entries:
            for entry in entries:
                path = prefix + entry.name
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(f"{path}/")
                if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                    found.append(path)
    return found

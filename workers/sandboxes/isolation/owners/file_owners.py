"""The owner of a file as its image defines it, recorded in an extended attribute, because the kernel knows one user of
a sandbox. Standard library only.

A file without the attribute belongs to root. Overlays show the attribute and copy it up; tar streams of layers keep it.
The root folder of a layer is marked if any of its files has one. Links and special files cannot have the attribute, so
they belong to root.
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
        """Owners of copied files: `each` for all, or as in the source if it is None.

        If the contents of a folder are copied, a new folder belongs to `each` or root; `whole` copies the folder's
        owner too.
        """

        each: Owner | None
        whole: bool


ATTRIBUTE = "user.farm.owner"
MARK = "user.farm.owners"
"""Attribute of a layer's root folder if some of its files have an owner."""
ROOT = (0, 0)
_CANNOT_HAVE = {errno.ENOTSUP, errno.EPERM, errno.EACCES}
_UNCHANGED = 0xFFFFFFFF
"""The id with which chown leaves a value unchanged."""


def owner_of(path: str | int) -> Owner | None:
    """Return the recorded owner of a file, or None. Links are not followed, except those of /proc."""
    return owner_at(path, follow=_follows(path))


def _follows(path: str | int) -> bool:
    return isinstance(path, int) or path.startswith("/proc/")


def owner_at(path: str | bytes | int, *, follow: bool) -> Owner | None:
    """Return the recorded owner of a file, or None."""
    try:
        uid, gid = os.getxattr(path, ATTRIBUTE, follow_symlinks=follow).split(b":")
        owner = int(uid), int(gid)
    except (OSError, ValueError):
        return None
    # programs can write the attribute themselves
    return owner if all(0 <= each < _UNCHANGED for each in owner) else None


def note_owner(path: str | int, uid: int, gid: int, root: str) -> None:
    """Record the owner of a file below `root`, given by path, descriptor or link in /proc. Raises OSError.

    `uid` and `gid` have the meaning of chown(2). A file that cannot have the attribute stays root's.
    """
    recorded = owner_of(path)
    old = recorded or ROOT
    new = (old[0] if uid == _UNCHANGED else uid, old[1] if gid == _UNCHANGED else gid)
    follow = _follows(path)
    try:
        if new == ROOT:
            if recorded is not None:
                os.removexattr(path, ATTRIBUTE, follow_symlinks=follow)
        elif new != recorded:
            os.setxattr(path, ATTRIBUTE, b"%d:%d" % new, follow_symlinks=follow)
            os.setxattr(root, MARK, b"1")
    except OSError as error:
        if error.errno not in _CANNOT_HAVE:
            raise


def owner_in(path: bytes, owner: Owner) -> Owner:
    """Return the owner of a new file: its creator, with the folder's group if that is set-group-id. Raises OSError."""
    folder = os.path.dirname(path)
    if not os.stat(folder).st_mode & stat.S_ISGID:
        return owner
    return owner[0], (owner_at(folder, follow=True) or ROOT)[1]


def note_folders(folders: Sequence[str], owners: CopiedOwners) -> None:
    """Record the owner of the folders that a copy created above its files. Raises OSError."""
    uid, gid = owners["each"] or ROOT
    for folder in folders:
        note_owner(folder, uid, gid, "/")


def clear_set_id(link: str) -> None:
    """Clear the set-id bits of a file, given by a link in /proc, as the kernel does at a change of owner.

    Folders keep both bits. A file that its group cannot execute keeps the group's bit.
    """
    mode = os.stat(link).st_mode
    lost = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
    if stat.S_ISREG(mode) and mode & lost:
        os.chmod(link, stat.S_IMODE(mode & ~lost))


def has_owners(folders: Iterable[str]) -> bool:
    """Return whether one of these layers has files with owners."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.getxattr(folder, MARK)
            return True
    return False


def settle(layer: str, owner: Sequence[int], lower: Sequence[str]) -> None:
    """Record owners of a layer that programs of one user have written on top of the layers `lower`.

    New files belong to that user, whatever the programs recorded; files of lower layers keep their owner.
    """
    uid, gid = owner
    for path in _entries(layer):
        below = next((f"{each}/{path}" for each in lower if os.path.lexists(f"{each}/{path}")), "")
        kept = (owner_of(below) or ROOT) if below else (uid, gid)
        # the policy can make files that fail
        with contextlib.suppress(OSError):
            note_owner(os.path.join(layer, path), *kept, layer)


def _entries(layer: str) -> list[str]:
    """Return the files and folders of a layer, without links and special files."""
    files: list[str] = []
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
                    files.append(path)
    return files

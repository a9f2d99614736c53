"""The user that sandboxes run as, and giving files to that user."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from functools import cache
from pathlib import Path

from farm.errors import SandboxError
from farm.settings import settings


@cache
def sandbox_user() -> tuple[int, int] | None:
    """User and group id that sandboxes run as when we are root; None if they run as ourselves. Raises SandboxError."""
    if os.geteuid() != 0:
        return None
    name = settings().sandbox_user
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise SandboxError(f"no user {name!r} on this node: set FARM_SANDBOX_USER to an ordinary user") from None
    if entry.pw_uid == 0:
        raise SandboxError("sandboxes must not run as root: set FARM_SANDBOX_USER to an ordinary user")
    return entry.pw_uid, entry.pw_gid


@cache
def drop_privileges() -> tuple[str, ...]:
    """Words to put before a host command so that it runs as the sandbox user. Raises SandboxError.

    `setpriv` and not the options of Popen, which would make it fork the whole worker.
    """
    path = shutil.which("setpriv")
    if path is None:
        raise SandboxError("this node has no `setpriv`: install util-linux")
    user = sandbox_user()
    words = ("--reuid", str(user[0]), "--regid", str(user[1]), "--clear-groups") if user else ()
    return (path, "--no-new-privs", *words)


def give(folder: Path) -> None:
    """Hand a tree to the sandbox user, links themselves and not what they lead to; modes stay. Blocks.

    An overlay cannot change a file whose owner or group has no number in the sandbox (EOVERFLOW).
    """
    user = sandbox_user()
    if user is None:
        return
    _give(folder, user)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _give(Path(parent, name), user)


def _give(path: Path, user: tuple[int, int]) -> None:
    mode = path.lstat().st_mode
    os.chown(path, *user, follow_symlinks=False)
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        # another owner takes them away
        path.chmod(stat.S_IMODE(mode))

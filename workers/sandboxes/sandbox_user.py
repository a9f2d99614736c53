"""The user that sandboxes run as, and changes of ownership to that user."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from functools import cache
from pathlib import Path

from farm.errors import SandboxError


@cache
def sandbox_user(name: str) -> tuple[int, int] | None:
    """Return the user and group id of sandboxes if this process is root, else None. Raises SandboxError."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise SandboxError(f"no user {name!r} on this node: set FARM_SANDBOX_USER to an ordinary user") from None
    if entry.pw_uid == 0:
        raise SandboxError("sandboxes must not run as root: set FARM_SANDBOX_USER to an ordinary user")
    return entry.pw_uid, entry.pw_gid


@cache
def drop_privileges(name: str) -> tuple[str, ...]:
    """Return the command prefix that runs a host command as the sandbox user. Raises SandboxError.

    `setpriv` is used because the options of Popen would fork the whole worker.
    """
    path = shutil.which("setpriv")
    if path is None:
        raise SandboxError("this node has no `setpriv`: install util-linux")
    user = sandbox_user(name)
    words = ("--reuid", str(user[0]), "--regid", str(user[1]), "--clear-groups") if user else ()
    return (path, "--no-new-privs", *words)


def give(folder: Path, name: str) -> None:
    """Change the owner of a tree to the sandbox user. Links are not followed, and modes are kept. Blocks.

    An overlay cannot change a file whose owner or group is not mapped in the sandbox (EOVERFLOW).
    """
    user = sandbox_user(name)
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
        # a change of owner clears the set-id bits
        path.chmod(stat.S_IMODE(mode))

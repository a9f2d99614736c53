# ruff: noqa: PTH103, PTH116, PTH119, PTH120, PTH123, S606
"""Start a zygote cleanly: as the sandbox's user, with a chosen environment, from a write-protected program file.

The policy controls the processes that the zygote forks, and their `/proc/self/exe` is a file of the host, outside of
all mounts of the sandbox. If the farm's user owns its Python, the policy could open that file for writing and change
it. So the zygote runs from a sealed copy in memory, as runc does since CVE-2019-5736.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys

from workers.sandboxes.isolation import linux, namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    class Job(TypedDict):
        """Plain JSON. `folders` are read by the program; `user` is None if it runs as the caller's."""

        user: tuple[int, int] | None
        folders: list[str]
        argv: list[str]
        env: dict[str, str]


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHUNK = 1 << 24


def main() -> None:
    """Run the job from standard input, with the last argument of this program, the number of an inherited socket."""
    job: Job = json.load(sys.stdin)
    os.umask(0o022)
    os.chdir("/")
    if job["user"]:
        open_the_way(job["folders"])
        namespaces.become(*job["user"])
    linux.no_new_privileges()
    namespaces.default_signals()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.execve(sealed_copy(job["argv"][0]), [*job["argv"], sys.argv[-1]], job["env"])


def open_the_way(folders: Sequence[str]) -> None:
    """Make folders in a closed folder, such as root's home, accessible to all users, in a separate mount namespace."""
    closed = {folder: above for folder in folders if (above := _closed(folder))}
    if not closed:
        return
    linux.unshare(linux.NEWNS)
    linux.make_mounts_private()
    held = {folder: os.open(folder, os.O_PATH | os.O_CLOEXEC) for folder in closed}
    for above in set(closed.values()):
        linux.mount("tmpfs", above, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=64k")
    for folder in sorted(closed):
        os.makedirs(folder, exist_ok=True)
        linux.bind_read_only(f"/proc/self/fd/{held[folder]}", folder)


def _closed(path: str) -> str:
    """Return the uppermost parent of a path that not everyone may enter; empty if there is none."""
    above, uppermost = path, ""
    while above != "/":
        if not os.stat(above).st_mode & stat.S_IXOTH:
            uppermost = above
        above = os.path.dirname(above)
    return uppermost


def sealed_copy(path: str) -> int:
    """Return a memory file with the same contents, sealed against changes."""
    copy = os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            view = memoryview(chunk)
            while view:
                view = view[os.write(copy, view) :]
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    return copy

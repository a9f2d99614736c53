"""A process of the container runtime in namespaces of its own, in which it can write to one folder only.

The runtime follows links of the image that it builds: an image whose /etc/resolv.conf is a link to a file of the node
would have that file overwritten. So every mount is read-only for it but that of its place. The folder of the blobs that
builds share is writable by a name that is drawn for each process, so that no link of an image can name it.

`python -I -S -c SOURCE PROJECT PLACE SHARED UID GID PREFIX CLOSED PROGRAM WORDS...`, with standard library only. UID
and GID are of the user that it becomes, or empty. PREFIX is the runtime's folder and CLOSED the uppermost folder on the
way to it that this user cannot enter, or both are empty. It ends with the process, with the process's exit code, and
with its own parent.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys

from workers.sandboxes.isolation import linux

CACHES = ("APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR")


def main() -> None:
    place, shared, uid, gid, prefix, closed, *command = sys.argv[2:]
    os.chdir(place)
    if uid:
        # the host's root can do this without a namespace of users, in which it could become no other user
        linux.unshare(linux.NEWNS)
        linux.make_mounts_private()
        if closed:
            _expose(prefix, closed, f"{place}/prefix")
        _confine(place, shared)
        linux.set_ids(int(uid), int(gid))
        linux.become_user_of_a_new_user_namespace(int(uid), int(gid))
        linux.unshare(linux.NEWNS | linux.NEWPID)
    else:
        linux.become_user_of_a_new_user_namespace(os.geteuid(), os.getegid())
        linux.unshare(linux.NEWNS | linux.NEWPID)
        linux.make_mounts_private()
        _confine(place, shared)
    linux.no_new_privileges()
    linux.die_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        linux.die_with_parent(signal.SIGKILL)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        os.execvp(command[0], command)  # noqa: S606
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _expose(prefix: str, closed: str, kept: str) -> None:
    """Open the way to the runtime, and hide all else that is in the folder that is closed."""
    os.makedirs(kept, exist_ok=True)  # noqa: PTH103
    linux.mount(prefix, kept, flags=linux.MS_BIND | linux.MS_REC)
    linux.mount("tmpfs", closed, "tmpfs", options="mode=755")
    os.makedirs(prefix, exist_ok=True)  # noqa: PTH103
    linux.mount(kept, prefix, flags=linux.MS_BIND)


def _confine(place: str, shared: str) -> None:
    writable = ["/proc", place]
    linux.mount(place, place, flags=linux.MS_BIND)
    if shared != place:
        writable.append(f"{place}/blobs-{secrets.token_hex(16)}")
        os.mkdir(writable[-1], 0o700)  # noqa: PTH102
        linux.mount(shared, writable[-1], flags=linux.MS_BIND)
        os.environ |= dict.fromkeys(CACHES, writable[-1])
    linux.leave_writable(writable)
    # the working directory is that below the mount until now
    os.chdir(place)

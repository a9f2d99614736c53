"""A process of the container runtime in its own namespaces, in which it can write to only one folder.

The runtime follows links of the image that it builds: if /etc/resolv.conf of an image is a link to a file of the node,
the runtime overwrites that file. So all mounts are read-only for it except its work folder. The folder of the blobs
that builds share is writable under a random name, so no link of an image can point to it.

`python -I -S -c SOURCE PROJECT WORK_FOLDER SHARED UID GID PREFIX CLOSED PROGRAM WORDS...`, with standard library only.
UID and GID are of the user that it becomes, or empty. PREFIX is the runtime's folder and CLOSED the uppermost of its
parents that this user cannot enter, or both are empty. It exits with the process's exit code, and ends with its own
parent.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys

from workers.sandboxes.isolation import linux

CACHES = ("APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR")


def main() -> None:
    work_folder, shared, uid, gid, prefix, closed, *command = sys.argv[2:]
    os.chdir(work_folder)
    if uid:
        # the host's root needs no user namespace here, and within one could not become another user
        linux.unshare(linux.NEWNS)
        linux.make_mounts_private()
        if closed:
            _expose(prefix, closed, f"{work_folder}/prefix")
        _confine(work_folder, shared)
        linux.set_ids(int(uid), int(gid))
        linux.become_user_of_a_new_user_namespace(int(uid), int(gid))
        linux.unshare(linux.NEWNS | linux.NEWPID)
    else:
        linux.become_user_of_a_new_user_namespace(os.geteuid(), os.getegid())
        linux.unshare(linux.NEWNS | linux.NEWPID)
        linux.make_mounts_private()
        _confine(work_folder, shared)
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
    os.makedirs(kept, exist_ok=True)  # noqa: PTH103
    linux.mount(prefix, kept, flags=linux.MS_BIND | linux.MS_REC)
    linux.mount("tmpfs", closed, "tmpfs", options="mode=755")
    os.makedirs(prefix, exist_ok=True)  # noqa: PTH103
    linux.mount(kept, prefix, flags=linux.MS_BIND)


def _confine(work_folder: str, shared: str) -> None:
    writable = ["/proc", work_folder]
    linux.mount(work_folder, work_folder, flags=linux.MS_BIND)
    if shared != work_folder:
        writable.append(f"{work_folder}/blobs-{secrets.token_hex(16)}")
        os.mkdir(writable[-1], 0o700)  # noqa: PTH102
        linux.mount(shared, writable[-1], flags=linux.MS_BIND)
        os.environ |= dict.fromkeys(CACHES, writable[-1])
    linux.leave_writable(writable)
    # until now, the working directory is the one below the mount
    os.chdir(work_folder)

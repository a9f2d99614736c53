"""Program that tests for the kernel features of a sandbox (namespaces, overlayfs) in a prepared folder."""

from __future__ import annotations

import os
import sys

from workers.sandboxes.isolation import linux


def main() -> None:
    """Arguments: code path, folder, optional uid and gid. Raises OSError if a feature is missing."""
    os.chdir(sys.argv[2])
    if len(sys.argv) > 3:
        os.setgroups([])
        os.setgid(int(sys.argv[4]))
        os.setuid(int(sys.argv[3]))
        linux.let_others_look_in(True)
    linux.become_root_of_a_new_user_namespace(linux.NEWNS)
    linux.make_mounts_private()
    linux.mount("overlay", "root", "overlay", 0, "userxattr,lowerdir=lower,upperdir=upper,workdir=work")
    os.remove("root/folder/file")
    os.rmdir("root/folder")
    os.mkdir("root/folder")
    linux.unshare(linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS)
    if os.fork() == 0:
        linux.mount("proc", "root", "proc", 0)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))

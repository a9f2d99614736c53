"""The sandboxes' disk: a small file system of its own, where the run may mount one, which takes root.

It is mounted in a mount namespace of the run: it ends with the run, however that ends, and no process of somebody else
that makes a namespace meanwhile takes a copy of it along.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

BALLAST = "ballast"
"""The folder of it that holds what a fault has taken."""
_SIZE = "size=1500m,nr_inodes=300k"
_SOURCE = "farm-chaos"
_CLONE_NEWNS = 0x00020000


def mount_disk(folder: Path) -> bool:
    """Put a small file system of its own at a folder; False where that is not allowed.

    Only this thread and what it starts from now on see it.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False
    commands = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"{_SIZE},mode=0711", _SOURCE, str(folder)],
    )
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def is_disk(mount: str) -> bool:
    """Return whether a line of mountinfo is the disk."""
    return f" - tmpfs {_SOURCE} " in mount


def unmount_disk(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def free_disk(folder: Path) -> None:
    """Give back what a fault has taken of the disk."""
    subprocess.run(["rm", "-rf", str(folder / "scratch" / BALLAST)], check=False)

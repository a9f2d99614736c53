"""The sandboxes' disk: a separate small file system, if the run may mount one, which takes root.

It is mounted in a mount namespace of the run. So it ends with the run, however that ends, and other processes that
create namespaces do not copy it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

BALLAST = "ballast"
"""The folder in it for the files by which a fault fills it."""
_SIZE = "size=1500m,nr_inodes=300k"
_SOURCE = "farm-chaos"
_CLONE_NEWNS = 0x00020000


def mount_disk(folder: Path) -> bool:
    """Mount a small file system at a folder; False where that is not allowed.

    Only this thread and its later children see it.
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
    """Remove the files by which a fault filled the disk."""
    subprocess.run(["rm", "-rf", str(folder / "scratch" / BALLAST)], check=False)

"""The node-local folder of a farm's process: private, and named so that two farms on one machine do not collide.

A node's folder has its name, which is unique among the nodes of its farm on this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import IO

from farm.errors import Conflict, NotAllowed
from farm.settings import Settings, choose, settings


def own_folder(scratch: Path, name: str, identity: str) -> Path:
    """Return `scratch/NAME-DIGEST`, creating it; `identity` distinguishes it, e.g. the store's URL.

    Others may pass through it, since sandboxes run as another user when the farm is root's; they cannot list it.
    Raises NotAllowed if another user created the folder first, as anyone can in a shared /tmp.
    """
    folder = scratch.absolute() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    for each in (scratch.absolute(), folder):
        each.mkdir(mode=0o711, parents=True, exist_ok=True)
        status = each.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise NotAllowed(f"{each} belongs to another user: set FARM_SCRATCH to a local folder of your own")
        if status.st_mode & 0o022 or not status.st_mode & 0o001:
            each.chmod(0o711)
    return folder


def locked(path: Path, what: str) -> IO[str]:
    """Hold a lock file until the returned file is closed or this process ends, however it ends. Raises Conflict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Conflict(what) from None
    return file


def own_settings() -> tuple[Settings, IO[str]]:
    """Return the settings and the lock of a node, with its own scratch folder, so it never sweeps another farm's.

    If the name comes from Slurm and is taken on this machine, the job's id is added, then that of the step and process.
    Raises Conflict if every name is taken.
    """
    shared = settings()
    names = [shared.node]
    if "FARM_NODE" not in os.environ and (job := os.environ.get("SLURM_JOB_ID")):
        step = f"{os.environ.get('SLURM_STEP_ID', '0')}.{os.environ.get('SLURM_PROCID', '0')}"
        names += [f"{shared.node}-{job}", f"{shared.node}-{job}.{step}"]
    for name in names:
        folder = own_folder(shared.scratch, name, shared.database_url)
        message = f"node {name} runs on this machine already: set FARM_NODE to another name for this one"
        try:
            lock = locked(folder / "lock", message)
        except Conflict:
            if name != names[-1]:
                continue
            raise
        return choose(scratch=folder, node=name), lock
    raise AssertionError("there is a name at least")

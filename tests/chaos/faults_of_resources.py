"""Faults of a machine that runs short: a full disk, no inodes, a process without descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from functools import partial
from pathlib import Path

from farm.records.rollout import Stage
from tests.chaos.disk import BALLAST, free_disk
from tests.chaos.processes import running
from tests.chaos.strikes import NotNow, Scene, Strike, kind
from workers.sandboxes.lifecycle.state import Process

_MANY = 2000
"""Files that are made in a moment."""
_FEW = 24
"""Descriptors beyond the open ones of a process: too few for its work, enough to report the error."""


def _disk(scene: Scene) -> Path:
    scratch = scene.parts.folder / "scratch"
    if not scene.parts.has_disk:
        raise NotNow("a disk of its own: that takes root")
    ballast = scratch / BALLAST
    if ballast.exists():
        raise NotNow("a disk with room")
    ballast.mkdir(mode=0o700)
    return ballast


@kind(2)
def fill_disk(scene: Scene) -> Strike:
    """Leave no free block."""
    ballast = _disk(scene)
    result = os.statvfs(ballast)
    with (ballast / "blocks").open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, result.f_bavail * result.f_frsize))
    for_s = scene.chance.uniform(5.0, 20.0)
    return Strike(f"for {for_s:.0f} s", undo=partial(free_disk, scene.parts.folder), after_s=for_s)


@kind(1)
def fill_inodes(scene: Scene) -> Strike:
    """Leave no free inode."""
    ballast = _disk(scene)
    with contextlib.suppress(OSError):
        for number in range(1_000_000):
            if number % _MANY == 0:
                scene.restart_dead()
            os.close(os.open(ballast / str(number), os.O_CREAT | os.O_WRONLY, 0o600))
    for_s = scene.chance.uniform(5.0, 20.0)
    return Strike(f"for {for_s:.0f} s", undo=partial(free_disk, scene.parts.folder), after_s=for_s)


@kind(1)
def limit_descriptors(scene: Scene) -> Strike:
    """Let a worker open hardly any more descriptors for a while."""
    node = scene.chance.choice([node for node in scene.parts.nodes if node.running] or [None])
    stage = scene.chance.choice(list(Stage))
    result = running(node.pid, f"{stage}@{node.name}") if node is not None else []
    if node is None or not result:
        raise NotNow("a worker")
    worker = result[0]
    try:
        n_open = len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
        before = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (min(n_open + _FEW, before[1]), before[1]))
    except OSError:
        raise NotNow("a worker that lives") from None
    for_s = scene.chance.uniform(5.0, 20.0)
    target = f"{node.name}/{stage}/{worker.pid} to {n_open + _FEW} for {for_s:.0f} s"
    return Strike(target, undo=partial(_unlimited, worker, before), after_s=for_s)


def _unlimited(worker: Process, before: tuple[int, int]) -> None:
    if worker.alive():
        with contextlib.suppress(OSError):
            resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, before)

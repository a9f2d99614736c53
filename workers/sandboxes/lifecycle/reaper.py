"""Remove sandboxes that are no longer needed, or whose monitor was killed, from a node.

Sandboxes of the warm pool belong to no rollout; they are removed by age, and so are unused layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from uuid import uuid4

from farm.ids import owner_of_sandbox
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.lifecycle.state import (
    STOP_S,
    Process,
    SandboxRecord,
    is_locked,
    starter,
    terminate_in,
)
from workers.sandboxes.remove_tree import remove

STARTING_S = 120.0
"""A start that takes longer hangs: it has no record, but its lock is held. Twice the time limit of a start."""
UNLOCKED_S = 5.0
"""Seconds for which an unlocked folder without a record is kept: its creator locks it immediately."""
WAIT_TIMEOUT_S = 5.0
_POLL_S = 0.05


def sweep(config: SandboxConfig, keep: Callable[[], Collection[str]], starting_s: float = STARTING_S) -> list[str]:
    """End and remove every sandbox of this node whose id is not in the result of `keep()`; returns their ids.

    `keep` is called after the folders are listed, so a sandbox that starts in between never counts as abandoned.

    A broken sandbox that is still needed is left to its user. Blocks; sandboxes that do not end cost a few seconds
    in total.
    """
    gone = _sweep(config, keep, starting_s, config.warm_pool_idle_s, STOP_S)
    cgroups.sweep(config, config.sandboxes_folder)
    layers.sweep(config, config.layer_idle_s)
    return gone


def _sweep(
    config: SandboxConfig,
    keep: Callable[[], Collection[str]],
    starting_s: float,
    warm_pool_idle_s: float,
    patience_s: float,
) -> list[str]:
    """Sweep only the sandboxes; returns the ids of the removed ones. Those of the warm pool have no id."""
    parent = config.sandboxes_folder
    states = sorted(parent.iterdir()) if parent.is_dir() else []
    wanted = keep() if states else ()
    unwanted = [
        state
        for state in states
        if state.name not in wanted and not warm_pool.is_pooled(state) and not _is_kept(state.name)
    ]
    ours = [state for state in unwanted if SandboxRecord.load(state) or _abandoned(state, starting_s)]
    dropped = [warm_pool.dropped(state, starting_s, warm_pool_idle_s) for state in states if warm_pool.is_pooled(state)]
    gone = terminate_in([*ours, *filter(None, dropped)], patience_s)
    return sorted(state.name for state in gone if state in ours)


def sweep_all(config: SandboxConfig, patience_s: float = WAIT_TIMEOUT_S) -> None:
    """End and remove everything left on a node that shuts down, after its lifelines are closed. Blocks until then.

    A sandbox that is being started at that moment ends by itself once it is up, and is waited for.
    """
    deadline = time.monotonic() + patience_s
    parent = config.sandboxes_folder
    while True:
        # the closed lifeline has ended them already
        _sweep(config, tuple, starting_s=0.0, warm_pool_idle_s=0.0, patience_s=patience_s / 2)
        if not (parent.is_dir() and any(parent.iterdir())) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    cgroups.sweep(config, config.sandboxes_folder, all_of_it=True)
    layers.sweep(config, idle_s=0.0)


def sweep_dead_nodes(config: SandboxConfig) -> list[str]:
    """Remove the remains of killed nodes that ran next to this one; returns the names of their folders. Blocks.

    A node holds its folder's lock while it runs. The folder is renamed first, so a node that restarts meanwhile finds
    none.
    """
    own = config.scratch
    gone = []
    for node in [path.parent for path in own.parent.glob("*/lock")]:
        if node == own or not (node / config.sandboxes_folder.name).is_dir() or node.stat().st_uid != os.getuid():
            continue
        aside = node.with_name(f"gone-{uuid4().hex[:8]}")
        with contextlib.suppress(FileNotFoundError, BlockingIOError), (node / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            node.rename(aside)
            terminate_in((aside / config.sandboxes_folder.name).iterdir())
            remove(aside)
            cgroups.sweep(config, node / config.sandboxes_folder.name, all_of_it=True)
            gone.append(node.name)
    return gone


def _is_kept(sandbox_id: str) -> bool:
    owner = owner_of_sandbox(sandbox_id)
    return owner is not None and Process(*owner).alive()


def _abandoned(state: Path, starting_s: float) -> bool:
    """Return whether a start failed, or hangs and can be given up."""
    try:
        age_s = time.time() - state.lstat().st_mtime
    except FileNotFoundError:
        return True
    if not is_locked(state):
        return age_s >= min(UNLOCKED_S, starting_s)
    return age_s >= starting_s and starter(state) is not None

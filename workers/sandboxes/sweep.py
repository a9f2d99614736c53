"""Removing what sandboxes left on a node: those that nobody wants any more, and those whose monitor was killed."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Collection
from pathlib import Path

from workers.sandboxes.joined import end
from workers.sandboxes.record import Record, folder_of_all
from workers.sandboxes.remove import remove

STARTING_S = 120.0
"""A folder without a record is left alone for so long: someone may be starting it. Twice what a start may take."""


def sweep(keep: Callable[[], Collection[str]], starting_s: float = STARTING_S) -> list[str]:
    """End and remove every sandbox of this node whose id is not in what `keep()` returns; returns their ids.

    `keep` is asked after the folders are listed: what is started between the two is never taken for abandoned.

    A sandbox that is wanted but broken is left to whoever finds it so. Blocks; one that will not end costs seconds.
    """
    gone = []
    parent = folder_of_all()
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    wanted = keep() if found else ()
    for state in found:
        if state.name in wanted:
            continue
        record = Record.load(state)
        if record is not None:
            end(record)
        elif not _abandoned(state, starting_s):
            continue
        remove(state)
        gone.append(state.name)
    return gone


def _abandoned(state: Path, starting_s: float) -> bool:
    """Whether a start came to nothing: no monitor holds the lock, and it is not so new that none could yet."""
    try:
        if time.time() - state.stat().st_mtime < starting_s:
            return False
        with (state / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True

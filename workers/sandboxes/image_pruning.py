"""Taking images out of the cache: never one that a sandbox stands on.

Whose sandboxes those are, and on which node of a shared home, is told by a lock that each one's monitor holds on its
image. There are file systems whose locks are not seen by other nodes, so an image that another one has used lately is
kept as well. "Lately" must be longer than a rollout goes without a start or a join of its sandbox.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from workers.sandboxes import fingerprints
from workers.sandboxes.content import remove_unfinished
from workers.sandboxes.image_cache import REMEMBER_S, Entry, entries, images, unheld
from workers.sandboxes.locking import if_free
from workers.sandboxes.remove import remove

ELSEWHERE_S = 86_400.0
"""How long an image is kept after another node has used it."""
STARTING_S = 120.0
"""How long after this one has: a sandbox that is starting has its image found before it has it locked."""

STOOD_ON = "a sandbox stands on it"

_DIGEST_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What became of an image that was to go: `kept` says why it stays, empty if it is gone."""

    entry: Entry
    kept: str = ""


def prune(wanted: Iterable[Entry]) -> list[Pruned]:
    """Remove these images, and all that builds which were killed have left. Blocks."""
    found = [Pruned(entry, why_kept(entry) or _remove(entry)) for entry in wanted]
    _remove_leftovers()
    return found


def unused_since(instant: float) -> list[Entry]:
    """The images that nobody has used since an instant, in seconds since 1970."""
    return [entry for entry in entries() if entry.last_used_at < instant]


def beyond(n_bytes: int) -> list[Entry]:
    """The images that must go for the others to fit, those first that were not used for the longest time."""
    found = sorted(entries(), key=lambda entry: entry.last_used_at, reverse=True)
    excess = []
    for entry in found:
        n_bytes -= entry.card.n_bytes
        if n_bytes < 0:
            excess.append(entry)
    return excess


def why_kept(entry: Entry) -> str:
    """Why an image must not be removed now; empty if it may be."""
    here = os.uname().nodename
    now = time.time()
    for node, used_at in entry.used_at.items():
        if now - used_at < (STARTING_S if node == here else ELSEWHERE_S):
            where = "" if node == here else f" on {node}"
            return f"used{where} {max(0, now - used_at):.0f} s ago"
    return STOOD_ON if is_stood_on(entry.folder) else ""


def is_stood_on(folder: Path) -> bool:
    """Whether a sandbox runs on an image now."""
    try:
        with unheld(folder) as free:
            return not free
    except FileNotFoundError:
        return False


def _remove(entry: Entry) -> str:
    """Take it away under another name first, so that nobody finds half of it."""
    aside = entry.folder.with_name(f"{entry.folder.name}.old.{uuid4().hex[:8]}")
    try:
        with unheld(entry.folder) as free:
            if not free:
                return STOOD_ON
            entry.folder.rename(aside)
    except FileNotFoundError:
        return ""
    remove(aside)
    return ""


def _remove_leftovers() -> None:
    """What was replaced and is free by now, what was never finished, locks and failures of what is no more."""
    for aside in images().glob("*.old.*"):
        if not is_stood_on(aside):
            remove(aside)
    for lock in images().glob("*.lock"):
        with suppress(OSError), if_free(lock) as held:
            folder = lock.with_suffix("")
            remove_unfinished(folder, held)
            if held and not folder.exists():
                lock.unlink()
    _remove_old(images().glob("*.failed*"), max(REMEMBER_S.values()))
    _remove_old(fingerprints.folder().glob("*"), _DIGEST_S)


def _remove_old(files: Iterable[Path], after_s: float) -> None:
    for file in files:
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > after_s:
                file.unlink()

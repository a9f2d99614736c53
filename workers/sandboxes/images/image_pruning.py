"""Removal of images from the cache: never of one that a sandbox uses.

Use, on any node of a shared home, shows by a lock that each sandbox's monitor holds on its image. There are file
systems whose locks are not seen by other nodes, so an image that another node has used lately is kept as well. "Lately"
must be longer than a rollout goes without a start or a join of its sandbox.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from workers.sandboxes.images import fingerprints
from workers.sandboxes.images.content_store import remove_unfinished
from workers.sandboxes.images.image_cache import REMEMBER_S, CachedImage, entries, images, parts, unheld
from workers.sandboxes.images.shared_lock import if_free
from workers.sandboxes.remove_tree import remove

ELSEWHERE_S = 86_400.0
"""Seconds for which an image is kept after another node has used it."""
STARTING_S = 120.0
"""Seconds for which it is kept after this node has: a sandbox that starts finds its image before it locks it."""

STOOD_ON = "a sandbox stands on it"
PART = "an image consists of it"

_DIGEST_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """The outcome for an image that was to be removed: `kept` is the reason why it was not, empty if it was."""

    entry: CachedImage
    kept: str = ""


def prune(wanted: Iterable[CachedImage]) -> list[Pruned]:
    """Remove these images, and all that killed builds have left. Blocks."""
    result = []
    needed: set[Path] = set()
    for each in examined(wanted):
        kept = each.kept or (PART if each.entry.folder in needed else "")
        shared = _parts(each.entry) if not kept else set()
        kept = kept or _remove(each.entry)
        # it was taken into use just now
        needed |= shared if kept else set()
        result.append(Pruned(each.entry, kept))
    _remove_leftovers()
    return result


def examined(wanted: Iterable[CachedImage]) -> list[Pruned]:
    """Return which of these images would be removed, those that consist of others first. Blocks."""
    listed = list(wanted)
    reasons = {entry.folder: why_kept(entry) for entry in listed}
    stay = [entry for entry in entries() if reasons.get(entry.folder, STOOD_ON)]
    needed = {part for entry in stay for part in _parts(entry)}
    listed.sort(key=lambda entry: not _parts(entry))
    return [Pruned(entry, reasons[entry.folder] or (PART if entry.folder in needed else "")) for entry in listed]


def _parts(entry: CachedImage) -> set[Path]:
    return {part.parent for part in parts(entry.folder)}


def unused_since(instant: float) -> list[CachedImage]:
    """Return the images that were not used since an instant, in seconds since 1970."""
    return [entry for entry in entries() if entry.last_used_at < instant]


def beyond(n_bytes: int) -> list[CachedImage]:
    """Return the images to remove for the others to fit in so many bytes: the least recently used."""
    result = sorted(entries(), key=lambda entry: entry.last_used_at, reverse=True)
    excess = []
    for entry in result:
        n_bytes -= entry.card.n_bytes
        if n_bytes < 0:
            excess.append(entry)
    return excess


def why_kept(entry: CachedImage) -> str:
    """Return the reason why an image must not be removed now; empty if it may be."""
    here = os.uname().nodename
    now = time.time()
    for node, used_at in entry.used_at.items():
        if now - used_at < (STARTING_S if node == here else ELSEWHERE_S):
            where = "" if node == here else f" on {node}"
            return f"used{where} {max(0, now - used_at):.0f} s ago"
    return STOOD_ON if is_stood_on(entry.folder) else ""


def is_stood_on(folder: Path) -> bool:
    """Return whether a sandbox uses an image now."""
    try:
        with unheld(folder) as free:
            return not free
    except FileNotFoundError:
        return False


def _remove(entry: CachedImage) -> str:
    """Remove it, renamed first so that no sandbox gets half of it; return the reason if it is kept, else empty."""
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
    """Remove replaced images that are unused by now, unfinished ones, stale locks, old failures and old digests."""
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

"""Removal of images from the cache, except those that a sandbox uses.

Use on any node of a shared home is visible as a lock that each sandbox's monitor holds on its image. Some file systems
do not show locks to other nodes, so an image that another node has used recently is kept, too. "Recently" must be
longer than a rollout can go without a start or a join of its sandbox.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from workers.config import SandboxConfig
from workers.sandboxes.images.content_store import PARTS, remove_unfinished, use_mark
from workers.sandboxes.images.image import CACHED, aliases
from workers.sandboxes.images.image_cache import (
    REMEMBER_S,
    CachedImage,
    cached_parts,
    entries,
    is_part,
    locked_keys,
    parts,
    unheld,
)
from workers.sandboxes.images.shared_lock import if_free
from workers.sandboxes.remove_tree import remove

ELSEWHERE_S = 86_400.0
"""Seconds for which an image is kept after another node has used it."""
STARTING_S = 120.0
"""Seconds for which it is kept after this node has used it: a sandbox finds its image before it locks it."""

IN_USE = "a sandbox uses it"
PART = "an image consists of it"

_DIGEST_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class PrunedImage:
    """The outcome for an image to remove: `kept` is the reason why it was not removed, else empty."""

    entry: CachedImage
    kept: str = ""


def prune(config: SandboxConfig, wanted: Iterable[CachedImage]) -> list[PrunedImage]:
    """Remove these images, and the remains of killed builds. Blocks."""
    pruned = []
    needed: set[Path] = set()
    for each in examined(config, wanted):
        kept = each.kept or (PART if each.entry.folder in needed else "")
        shared = _parts(each.entry) if not kept else set()
        kept = kept or _remove(config, each.entry)
        # it has just been taken into use
        needed |= shared if kept else set()
        pruned.append(PrunedImage(each.entry, kept))
    _remove_leftovers(config)
    return pruned


def examined(config: SandboxConfig, wanted: Iterable[CachedImage]) -> list[PrunedImage]:
    """Return which of these images would be removed, those that consist of others first. Blocks."""
    listed = list(wanted)
    reasons = {entry.folder: why_kept(config, entry) for entry in listed}
    stay = [entry for entry in entries(config) if reasons.get(entry.folder, IN_USE)]
    needed = {part for entry in stay for part in _parts(entry)}
    listed.sort(key=lambda entry: not _parts(entry))
    return [PrunedImage(entry, reasons[entry.folder] or (PART if entry.folder in needed else "")) for entry in listed]


def _parts(entry: CachedImage) -> set[Path]:
    return {part.parent for part in parts(entry.folder)}


def everything(config: SandboxConfig) -> list[CachedImage]:
    """Return all images, and all other cached data of sandboxes: environments, programs, archives."""
    return [*entries(config), *cached_parts(config)]


def unused_since(config: SandboxConfig, instant: float) -> list[CachedImage]:
    """Return entries that were not used since an instant, in seconds since 1970."""
    return [entry for entry in everything(config) if entry.last_used_at < instant]


def prune_by_itself(config: SandboxConfig, keep_s: float, n_bytes: int) -> list[PrunedImage]:
    """Remove entries unused for `keep_s`, and the least recently used ones beyond `n_bytes`; 0 means no limit.

    Entries with an alias or a lock are kept, because they might not be reproducible. Blocks.
    """
    wanted = {each.folder: each for each in unused_since(config, time.time() - keep_s)} if keep_s else {}
    wanted |= {each.folder: each for each in beyond(config, n_bytes)} if n_bytes else {}
    named = tuple(each.removeprefix(CACHED) for each in aliases(config).values() if each.startswith(CACHED))
    locked = locked_keys(config)
    free = (each for each in wanted.values() if each.card.key not in locked and not each.card.key.startswith(named))
    return prune(config, free)


def beyond(config: SandboxConfig, n_bytes: int) -> list[CachedImage]:
    """Return the least recently used entries to remove so that the rest fits in `n_bytes`."""
    newest_first = sorted(everything(config), key=lambda entry: entry.last_used_at, reverse=True)
    excess = []
    for entry in newest_first:
        n_bytes -= entry.card.n_bytes
        if n_bytes < 0:
            excess.append(entry)
    return excess


def why_kept(config: SandboxConfig, entry: CachedImage) -> str:
    """Return the reason why an image must not be removed now; empty if it may be."""
    own_node = os.uname().nodename
    now = time.time()
    for node, used_at in entry.used_at.items():
        if now - used_at < (STARTING_S if node == own_node else ELSEWHERE_S):
            where = f" on {node}" if node not in ("", own_node) else ""
            return f"used{where} {max(0, now - used_at):.0f} s ago"
    return IN_USE if is_in_use(config, entry.folder) else ""


def is_in_use(config: SandboxConfig, folder: Path) -> bool:
    """Return whether a sandbox uses an image now."""
    try:
        with unheld(config, folder) as free:
            return not free
    except FileNotFoundError:
        return False


def _remove(config: SandboxConfig, entry: CachedImage) -> str:
    """Remove it, renamed first so that no sandbox gets half of it; return the reason if it is kept, else empty."""
    aside = entry.folder.with_name(f"{entry.folder.name}.old.{uuid4().hex[:8]}")
    try:
        with unheld(config, entry.folder) as free:
            if not free:
                return IN_USE
            if is_part(config, entry.folder):
                # first, so that no process that found the folder holds a deleted one
                use_mark(entry.folder).unlink()
            entry.folder.rename(aside)
    except FileNotFoundError:
        return ""
    remove(aside)
    return ""


def _remove_leftovers(config: SandboxConfig) -> None:
    for aside in config.images_folder.glob("*.old.*"):
        if not is_in_use(config, aside):
            remove(aside)
    for kind in PARTS:
        # their lock was free when they were moved aside
        for aside in (config.cache / kind).glob("*.old.*"):
            remove(aside)
    for lock in config.images_folder.glob("*.lock"):
        with suppress(OSError), if_free(lock) as held:
            folder = lock.with_suffix("")
            remove_unfinished(folder, held)
            if held and not folder.exists():
                lock.unlink()
    _remove_old(config.images_folder.glob("*.failed*"), max(REMEMBER_S.values()))
    _remove_old(config.digests_folder.glob("*"), _DIGEST_S)


def _remove_old(files: Iterable[Path], after_s: float) -> None:
    for file in files:
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > after_s:
                file.unlink()

"""The warm pool: sandboxes that are started before they are requested, and handed over by renaming their folder.

The pool lies among the sandboxes of the node, under names that no sandbox can have: `.starting.KEY.NAME` until a
sandbox is up, then `.ready.KEY.NAME`. Requests with the same key may take it. Only one rename succeeds, even between
processes. A sandbox that is removed is first renamed to `.gone.NAME`, so that it cannot be taken any more.

A monitor does not know its folder's path, and mounts follow a rename, so a sandbox does not notice. Its lifeline is
that of the node, so the pool outlives the worker that filled it, but never the node.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from farm.records.request import SandboxSpec
from workers.config import SandboxConfig
from workers.sandboxes.lifecycle.state import SandboxRecord, terminate_in

_STARTING, _READY, _GONE = ".starting", ".ready", ".gone"


@dataclass(frozen=True, slots=True)
class WarmPoolUse:
    """A recent request for a sandbox of a key, with all that is needed to start one in advance."""

    key: str
    kind: str
    spec: SandboxSpec


def starting(config: SandboxConfig, key: str) -> Path:
    """Return the folder for a sandbox that is about to be started for the pool."""
    return config.sandboxes_folder / f"{_STARTING}.{key}.{uuid4().hex[:8]}"


def put(record: SandboxRecord) -> Path:
    """Mark a sandbox as ready to be taken, and return its new folder."""
    _, _, key, name = record.folder.name.split(".")
    return record.folder.rename(record.folder.with_name(f"{_READY}.{key}.{name}"))


def take(config: SandboxConfig, key: str, target: Path) -> SandboxRecord | None:
    """Move a sandbox of this key to the folder `target`. Returns None if there is none. Blocks briefly."""
    for path in ready(config).get(key, ()):
        try:
            path.rename(target)
        except FileNotFoundError:
            continue
        except OSError:
            # a sandbox with this id exists already
            return None
        record = SandboxRecord.load(target)
        if record is not None and record.first.alive() and record.monitor.alive():
            return record
        discard(target)
    return None


def ready(config: SandboxConfig) -> dict[str, list[Path]]:
    """Return the folders of sandboxes that can be taken, by key."""
    folders: dict[str, list[Path]] = defaultdict(list)
    parent = config.sandboxes_folder
    with suppress(FileNotFoundError), os.scandir(parent) as entries:
        for name in sorted(entry.name for entry in entries if entry.name.startswith(f"{_READY}.")):
            folders[name.split(".")[2]].append(parent / name)
    return folders


def touch(path: Path) -> None:
    """Mark a sandbox as still wanted; unwanted ones are removed after a while."""
    with suppress(FileNotFoundError):
        os.utime(path)


def discard(path: Path) -> bool:
    """End and remove a sandbox that was not taken. Returns whether it was still there. Blocks."""
    gone = _dropped(path)
    if gone is None:
        return False
    terminate_in([gone])
    return True


def _dropped(path: Path) -> Path | None:
    """Rename its folder so that it cannot be taken any more. Returns the new folder, None if it is gone."""
    gone = path.with_name(f"{_GONE}.{uuid4().hex[:8]}")
    try:
        return path.rename(gone)
    except FileNotFoundError:
        return None


def is_pooled(path: Path) -> bool:
    """Return whether a folder among those of the sandboxes belongs to the warm pool."""
    return path.name.startswith(".")


def dropped(path: Path, starting_s: float, idle_s: float) -> Path | None:
    """Return the new folder of a pooled sandbox that must be ended; None if it stays in the pool.

    It must be ended if it has stopped, has been starting for longer than `starting_s`, or is unused for `idle_s`.
    """
    kind = "." + path.name.split(".")[1]
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    if kind == _GONE:
        return path
    too_old = age_s >= (starting_s if kind == _STARTING else idle_s)
    return _dropped(path) if too_old or (kind == _READY and _is_dead(path)) else None


def _is_dead(path: Path) -> bool:
    record = SandboxRecord.load(path)
    return record is None or not record.first.alive()


def note_use(config: SandboxConfig, use: WarmPoolUse) -> None:
    """Record a request for a sandbox, if a supervisor runs on this node. Otherwise no process fills the pool."""
    if config.lifeline_fd is None:
        return
    mark = config.used_folder / use.key
    try:
        os.utime(mark)
    except FileNotFoundError:
        mark.parent.mkdir(parents=True, exist_ok=True)
        new = mark.with_name(f"{use.key}.{uuid4().hex[:8]}")
        new.write_text(f"{use.kind}\n{use.spec.model_dump_json(exclude={'env'})}")
        new.rename(mark)


def uses(config: SandboxConfig, since_s: float) -> list[WarmPoolUse]:
    """Return the requests of the last `since_s` seconds, newest first, and remove older records."""
    by_age = []
    for mark in config.used_folder.glob("*"):
        with suppress(FileNotFoundError):
            age_s = time.time() - mark.stat().st_mtime
            if age_s > since_s:
                mark.unlink()
            elif "." not in mark.name:
                kind, _, spec = mark.read_text().partition("\n")
                by_age.append((age_s, WarmPoolUse(mark.name, kind, SandboxSpec.model_validate_json(spec))))
    return [use for _, use in sorted(by_age, key=lambda pair: pair[0])]

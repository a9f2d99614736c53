# ruff: noqa: PTH101, PTH112, PTH114
"""Restores a layer by the rule of `footprint.py`. Standard library only."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat

from workers.sandboxes.isolation.restoring.footprint import Footprint
from workers.sandboxes.isolation.restoring.image_contents import ImageContents
from workers.sandboxes.isolation.restoring.package_records import recorded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def restore_footprint(
    rule: dict[str, Any], lower: Sequence[str], paths: Callable[[], Iterator[str]], remove: Callable[[str], None]
) -> list[str]:
    """Remove from the working directory all paths that do not stay, and return them.

    `rule` has the fields of `RestoredFiles`, `bin_folders` and `workdir`. Raises OSError if a folder of the image,
    `lower`, cannot be read, because all files of the layer would count as new then.
    """
    image = ImageContents(lower, rule["bin_folders"])
    layer_paths = list(paths())
    programs, records = frozenset(rule["programs"]), recorded(layer_paths)
    footprint = Footprint(image, rule["named"], rule["workdir"], programs, records, rule["footprint"])
    footprint.read_pth(layer_paths)
    removed: list[str] = []
    for path in layer_paths:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            if not footprint.stays(path, mode):
                removed.append(path)
        elif footprint.is_system(path) and not footprint.is_own(path) and not _uncover(image.place(path), path):
            removed.append(path)
    for path in removed:
        remove(path)
    return removed


def summary(paths: Sequence[str], max_entries: int) -> list[str]:
    """Return at most `max_entries` entries that cover these paths: paths, or folders with a `/` at the end."""
    by_depth: dict[int, set[str]] = {}
    for path in paths:
        by_depth.setdefault(path.count("/"), set()).add(f"/{path}")
    n = len(paths)
    for depth in range(max(by_depth, default=0), 0, -1):
        if n <= max_entries:
            break
        # deeper paths were replaced by these folders
        deepest, above = by_depth.pop(depth, set()), by_depth.setdefault(depth - 1, set())
        folders = {posixpath.dirname(path.rstrip("/")) for path in deepest}
        n -= len(deepest) + len(above)
        above.difference_update(folders)
        above.update(f"{folder}/" for folder in folders)
        n += len(above)
    return sorted(path for entries in by_depth.values() for path in entries)[:max_entries]


def _uncover(image_folder: str, path: str) -> bool:
    """Make a folder transparent for the image's, with its mode. Returns False if the image's path is not a folder."""
    if not image_folder:
        return True
    if os.path.islink(image_folder) or not os.path.isdir(image_folder):
        return False
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            os.removexattr(path, name, follow_symlinks=False)
    os.chmod(path, stat.S_IMODE(os.lstat(image_folder).st_mode))
    return True

# ruff: noqa: PTH101, PTH112, PTH114
"""The restoring of a layer by the rule of `footprint.py`; standard library only."""

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
    """Remove from the working directory what is not the policy's to leave; return what it was.

    `rule` has the fields of `RestoredFiles`, `bin_folders` and `workdir`. Raises OSError if a folder of `lower`, the
    image, cannot be read: without it all of the layer would be new.
    """
    image = ImageContents(lower, rule["bin_folders"])
    found = list(paths())
    programs, records = frozenset(rule["programs"]), recorded(found)
    footprint = Footprint(image, rule["named"], rule["workdir"], programs, records, rule["footprint"])
    footprint.read_pth(found)
    removed: list[str] = []
    for path in found:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            if not footprint.stays(path, mode):
                removed.append(path)
        elif footprint.is_system(path) and not footprint.is_own(path) and not _uncovered(image.place(path), path):
            removed.append(path)
    for path in removed:
        remove(path)
    return removed


def summary(paths: Sequence[str], n_most: int) -> list[str]:
    """Return so many entries at most that cover these paths: themselves, or folders of them, with a `/` at the end."""
    by_depth: dict[int, set[str]] = {}
    for path in paths:
        by_depth.setdefault(path.count("/"), set()).add(f"/{path}")
    n = len(paths)
    for depth in range(max(by_depth, default=0), 0, -1):
        if n <= n_most:
            break
        # all that is deeper is in these folders by now
        deepest, above = by_depth.pop(depth, set()), by_depth.setdefault(depth - 1, set())
        folders = {posixpath.dirname(path.rstrip("/")) for path in deepest}
        n -= len(deepest) + len(above)
        above.difference_update(folders)
        above.update(f"{folder}/" for folder in folders)
        n += len(above)
    return sorted(path for found in by_depth.values() for path in found)[:n_most]


def _uncovered(below: str, path: str) -> bool:
    """Show what the image has in a folder, with its mode; False if the image has there what is no folder."""
    if not below:
        return True
    if os.path.islink(below) or not os.path.isdir(below):
        return False
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            os.removexattr(path, name, follow_symlinks=False)
    os.chmod(path, stat.S_IMODE(os.lstat(below).st_mode))
    return True

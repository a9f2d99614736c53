# ruff: noqa: PTH101, PTH112, PTH114
"""The restoring of a layer by the rule of `footprint.py`; standard library only."""

from __future__ import annotations

import contextlib
import os
import stat

from workers.sandboxes.isolation.restoring.footprint import Footprint
from workers.sandboxes.isolation.restoring.image_contents import ImageContents
from workers.sandboxes.isolation.restoring.package_records import recorded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def restore_footprint(
    rule: dict[str, Any], paths: Callable[[], Iterator[str]], remove: Callable[[str], None]
) -> list[str]:
    """Remove from the working directory what is not the policy's to leave; return what it was.

    `rule` has the fields of `RestoredFiles`, `lower`, `bin_folders` and `workdir`.
    """
    image = ImageContents(rule["lower"], rule["bin_folders"])
    found = list(paths())
    footprint = Footprint(image, rule["named"], rule["workdir"], frozenset(rule["programs"]), recorded(found))
    footprint.read_pth(found)
    removed: list[str] = []
    for path in found:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            if not footprint.stays(path, mode):
                removed.append(path)
        elif footprint.is_system(path) and not _uncovered(image.place(path), path):
            removed.append(path)
    for path in removed:
        remove(path)
    return removed


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

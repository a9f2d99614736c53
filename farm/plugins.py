"""Plug-ins, found by name through entry points, so that no package has to know its extensions."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from farm.errors import NotFound


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Name to entry point of every plug-in in a group, such as `farm.handlers`. Nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


@cache
def load(group: str, name: str) -> Any:
    """Return the object an entry point names, imported once. Raises NotFound, with the names there are.

    One that was installed since this process began is found; what it has imported already stays as it was.
    """
    if name not in installed(group):
        installed.cache_clear()
        importlib.invalidate_caches()
    points = installed(group)
    if name not in points:
        names = ", ".join(sorted(points)) or "none"
        mend = "install it in the Python of every node, and restart a node that still does not find it"
        raise NotFound(f"no {group} plug-in is called {name!r}; installed are: {names}; {mend}")
    return points[name].load()

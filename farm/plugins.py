"""Finds plug-ins by name through entry points, so that neither package has to know who extends it."""

from __future__ import annotations

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
    """The object an entry point names, imported once. Raises NotFound, with the names there are."""
    points = installed(group)
    if name not in points:
        raise NotFound(f"no {group} plug-in is called {name!r}; installed are: {', '.join(sorted(points)) or 'none'}")
    return points[name].load()

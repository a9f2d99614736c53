"""Plug-ins, found by name through entry points, so that no package has to know its extensions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeGuard, TypeVar

from farm.errors import NotFound

P = TypeVar("P")


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Name to entry point of every plug-in in a group, such as `farm.handlers`. Nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


def entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name, also of a plug-in that was installed since this process began."""
    if name not in installed(group):
        installed.cache_clear()
        importlib.invalidate_caches()
    return installed(group).get(name)


@cache
def load(group: str, name: str) -> Any:
    """Return the object an entry point names, imported once. Raises NotFound, with the names there are.

    One that was installed since this process began is found; what it has imported already stays as it was. One that
    was installed as a link to its source is not: a process reads those when it begins.
    """
    point = entry_point(group, name)
    if point is None:
        names = ", ".join(sorted(installed(group))) or "none"
        mend = "install it in the Python of every node, and restart a node that still does not find it"
        raise NotFound(f"no {group} plug-in is called {name!r}; installed are: {names}; {mend}")
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        again = "if it was installed since this process began, restart the node"
        raise NotFound(f"the {group} plug-in {name!r} cannot be imported here: {error}; {again}") from error


def follows(plugin: object, protocol: Callable[..., P]) -> TypeGuard[P]:
    """Return whether a plug-in has all that an optional protocol asks for; a method that is None is none.

    As `isinstance` of a protocol, at a hundredth of its time: stages ask it a dozen times for each rollout.
    """
    # mypy takes no protocol for a `type[P]`
    return all(getattr(plugin, name, None) is not None for name in _members(protocol))


@cache
def _members(protocol: Any) -> frozenset[str]:
    """Return the names of a protocol's methods and attributes."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    return frozenset(name for name in names if not name.startswith("_"))

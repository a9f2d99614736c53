"""All promises in reading order: the basic properties of a sandbox come first."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from farm.errors import NotFound
from workers.conformance.promises import (
    commands,
    crowds,
    files,
    isolation,
    kernels,
    lifetime,
    limits,
    networks,
    privileges,
    root_file_system,
    shells,
    transfer,
    tricks,
)
from workers.conformance.trial import Promise

SURFACE = "surface"
"""The name of the group with promises of other groups that a fake sandbox keeps, too."""

_MODULES = (
    *(commands, files, transfer, shells, kernels),
    *(isolation, networks, privileges, tricks, root_file_system),
    *(limits, lifetime, crowds),
)
PROMISES: tuple[Promise, ...] = tuple(
    found for module in _MODULES for found in vars(module).values() if isinstance(found, Promise)
)


def groups() -> tuple[str, ...]:
    """Return the names of all groups."""
    return (*dict.fromkeys(promise.group for promise in PROMISES), SURFACE)


def chosen(group: Collection[str] = (), only: Collection[str] = ()) -> tuple[Promise, ...]:
    """Return the promises of some groups or with a name that matches a pattern; all if neither is given.

    Raises NotFound if a group or a pattern matches none.
    """
    for name in group:
        if name not in groups():
            raise NotFound(f"no group of promises is called {name!r}; there are: {', '.join(groups())}")
    for pattern in only:
        if not any(fnmatchcase(promise.name, pattern) for promise in PROMISES):
            raise NotFound(f"no promise is called {pattern!r}; --list shows them")
    return tuple(promise for promise in PROMISES if not (group or only) or _is_meant(promise, group, only))


def _is_meant(promise: Promise, group: Collection[str], only: Collection[str]) -> bool:
    in_group = promise.group in group or (promise.surface and SURFACE in group)
    return in_group or any(fnmatchcase(promise.name, pattern) for pattern in only)

"""Imports of a process that has given up rights: a module that it can no longer read is a fault of the farm.

Libraries import parts of themselves at their first use and often take a failure for "no such part": a right answer
would be read as wrong. So where the confined user cannot read the modules, all of a library is imported before, and an
import that fails for this reason afterwards is known by name. Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

_NOT_FOR_SCORING = {"tests", "testing", "benchmarks", "conftest", "plotting", "__main__", "this", "tasks"}


class LateImports:
    """The last finder of modules: it finds none, and `missed` has the modules that cannot be read any more."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self._absent: set[str] = set()
        self._is_closed = False
        self._folders = [entry for entry in sys.path if Path(entry).is_dir()]
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Note a module that no other finder has found."""
        if not self._is_closed:
            self._absent.add(name)
        elif name not in self._absent:
            self.missed.append(name)

    def are_readable(self) -> bool:
        """Return whether the user of this process can read the folders that modules are in."""
        return all(os.access(folder, os.R_OK | os.X_OK) for folder in self._folders)

    def close(self) -> None:
        """From now on count modules that cannot be read as missed, but for those that were not there before."""
        self._is_closed = not self.are_readable()


def import_all(packages: Iterable[str]) -> None:
    """Import every module of these packages that scoring may use; takes seconds."""
    for package in packages:
        for name in _names(importlib.import_module(package)):
            with warnings.catch_warnings(), contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                importlib.import_module(name)


def _names(package: ModuleType) -> Iterable[str]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        # those of sympy whose names end so compute its documentation, for a second
        if _NOT_FOR_SCORING.isdisjoint(module.name.split(".")) and not module.name.endswith("_doc"):
            yield module.name

"""Detects failed imports of a process without rights: a module that it can no longer read is a fault of the farm.

Libraries import parts of themselves at first use and often treat a failure as "no such part": a right answer would
count as wrong. So if the confined user cannot read the modules, the whole library is imported beforehand, and any later
import that fails for this reason is recorded by name. Standard library only.
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
    """The last module finder: it finds nothing, and records in `missed` the modules that are no longer readable."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self._absent: set[str] = set()
        self._is_closed = False
        self._folders = [entry for entry in sys.path if Path(entry).is_dir()]
        sys.meta_path.append(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Record a module that no other finder has found."""
        if not self._is_closed:
            self._absent.add(name)
        elif name not in self._absent:
            self.missed.append(name)

    def are_readable(self) -> bool:
        """Return whether this process's user can read the folders of modules."""
        return all(os.access(folder, os.R_OK | os.X_OK) for folder in self._folders)

    def close(self) -> None:
        """From now on record unreadable modules as missed, except those that were missing before."""
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
        # Modules of sympy with such names compute its documentation, which takes a second.
        if _NOT_FOR_SCORING.isdisjoint(module.name.split(".")) and not module.name.endswith("_doc"):
            yield module.name

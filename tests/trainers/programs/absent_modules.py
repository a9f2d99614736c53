"""Empty modules in place of packages for GPUs that a trainer imports and that no code here calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _EmptyModule(ModuleType):
    """Any attribute of it is a class that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*words: object, **named: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not here")

        return type(name, (), {"__new__": refuse})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds the modules of these packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = any(name == package or name.startswith(f"{package}.") for package in self._packages)
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def leave_out(*packages: str, first: bool = False) -> None:
    """Import these packages, which are not installed, as empty ones; `first` replaces installed ones, too."""
    sys.meta_path.insert(0 if first else len(sys.meta_path), _EmptyModules(packages))

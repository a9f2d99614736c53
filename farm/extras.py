"""The optional parts of the distribution: `rollout-farm` is the client, `rollout-farm[farm]` the whole farm."""

from __future__ import annotations

from importlib.util import find_spec

from farm.errors import NotInstalled

_CORE = ("celery", "redis", "sqlalchemy")
"""Modules that only the extra `farm` installs."""


def check_extra(what: str) -> None:
    """Raise NotInstalled if packages of `rollout-farm[farm]`, which `what` needs, are missing."""
    if missing := [name for name in _CORE if find_spec(name) is None]:
        raise not_installed(what, *missing)


def not_installed(what: str, *modules: str, extra: str = "farm") -> NotInstalled:
    """Return the error that names the extra to install for `what`."""
    installed = "the client, the only part" if extra == "farm" else "the packages"
    return NotInstalled(
        f"{what} needs more than {installed} installed here ({', '.join(modules)} missing): "
        f"pip install 'rollout-farm[{extra}]'"
    )

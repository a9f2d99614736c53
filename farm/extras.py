"""The optional part of the distribution: `rollout-farm` is the client, `rollout-farm[farm]` all that a farm runs on."""

from __future__ import annotations

from importlib.util import find_spec

from farm.errors import NotInstalled

_CORE = ("celery", "redis", "sqlalchemy")
"""Modules of the extra that no client installs by itself."""


def check_extra(what: str) -> None:
    """Raise NotInstalled if the packages of `rollout-farm[farm]` are missing here, which `what` needs."""
    if missing := [name for name in _CORE if find_spec(name) is None]:
        raise not_installed(what, *missing)


def not_installed(what: str, *modules: str, extra: str = "farm") -> NotInstalled:
    """Return the error that names the extra to install for `what`."""
    here = "the client, which is all that is" if extra == "farm" else "what is"
    return NotInstalled(
        f"{what} needs more than {here} installed here ({', '.join(modules)} missing): "
        f"pip install 'rollout-farm[{extra}]'"
    )

"""The configuration of an image that was built here: what its Dockerfile says of the programs to be run in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """HEALTHCHECK: a command, for `/bin/sh -c` if it is one text; times in seconds."""

    command: str | list[str]
    interval_s: float = 30.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """ENV, WORKDIR, USER and what else a Dockerfile declares; `notes` say what was passed over or cannot be done.

    `user` is as written: a name or number, and a group after a colon; empty for root. `workdir` is empty if none is
    set. A command is one text for the shell, or a list of words.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: str | list[str] | None = None
    command: str | list[str] | None = None
    healthcheck: Healthcheck | None = None
    exposed: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    onbuild: tuple[str, ...] = ()
    """Instructions of stages and Dockerfiles that begin with this one."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ImageConfig:
        """Return it from the values of its JSON."""
        values = dict(fields)
        for name in ("shell", "exposed", "volumes", "onbuild", "notes"):
            values[name] = tuple(values.get(name, ()))
        check = values.get("healthcheck")
        values["healthcheck"] = Healthcheck(**check) if check else None
        return cls(**values)

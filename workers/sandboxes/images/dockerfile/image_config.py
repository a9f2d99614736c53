"""The configuration of an image: the settings of its Dockerfile for programs that run in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """HEALTHCHECK: a command (a single text runs by `/bin/sh -c`) and times in seconds."""

    command: str | list[str]
    interval_s: float = 30.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """ENV, WORKDIR, USER and other declarations of a Dockerfile; `notes` name ignored or impossible instructions.

    `user` is as written: a name or number, optionally with a group after a colon; empty for root. `workdir` is empty if
    none is set. A command is one text for the shell, or a list of words.
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
    """Instructions to run in stages and Dockerfiles that are based on this image."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ImageConfig:
        """Return the configuration from its JSON values."""
        values = dict(fields)
        for name in ("shell", "exposed", "volumes", "onbuild", "notes"):
            values[name] = tuple(values.get(name, ()))
        check = values.get("healthcheck")
        values["healthcheck"] = Healthcheck(**check) if check else None
        return cls(**values)

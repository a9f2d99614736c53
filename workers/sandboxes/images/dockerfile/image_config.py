"""The configuration of an image: the settings of its Dockerfile for programs that run in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.sandboxes.images.dockerfile.instructions import Instruction

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_TIMES = {
    "interval": "interval_s",
    "timeout": "timeout_s",
    "start-period": "start_period_s",
    "start-interval": "start_interval_s",
}


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


def healthcheck_of(instruction: Instruction) -> Healthcheck | None:
    """Return the check, None for `HEALTHCHECK NONE`. ImageError for other forms."""
    kind, _, rest = instruction.text.partition(" ")
    if kind.upper() == "NONE":
        return None
    if kind.upper() != "CMD" or not rest.strip():
        raise instruction.refused("the form is HEALTHCHECK CMD COMMAND or HEALTHCHECK NONE")
    times: dict[str, float] = {}
    retries = 3
    for name, value in instruction.flags:
        if name == "retries" and value.isdigit():
            retries = int(value)
        elif name in _TIMES:
            times[_TIMES[name]] = _seconds(instruction, value)
        else:
            raise instruction.refused(f"--{name}={value} is not known")
    return Healthcheck(_command(rest.strip()), retries=retries, **times)


def _command(text: str) -> str | list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        return text
    return [str(word) for word in words] if isinstance(words, list) else text


def _seconds(instruction: Instruction, value: str) -> float:
    parts = _PART.findall(value)
    if "".join(number + unit for number, unit in parts) != value or not parts:
        raise instruction.refused(f"{value!r} is not a time such as 5s, 1m30s or 500ms")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)

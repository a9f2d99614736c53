"""HEALTHCHECK of a Dockerfile, parsed to times and a command."""

from __future__ import annotations

import json
import re

from workers.sandboxes.images.dockerfile.image_config import Healthcheck
from workers.sandboxes.images.dockerfile.instructions import Instruction

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_TIMES = {
    "interval": "interval_s",
    "timeout": "timeout_s",
    "start-period": "start_period_s",
    "start-interval": "start_interval_s",
}


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

"""Durations as arguments of commands."""

from __future__ import annotations

import re

import click

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds(context: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return a duration such as 30m, 12h or 7d in seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration such as 30m, 12h or 7d")
    return float(match[1]) * UNITS_S[match[2]]

"""The long forms of tests: `make soak SOAK_MINUTES=M` plays them for about as long, `make test` plays the short ones.

A test with a long form has the marker `soak`; by `repeats` or `at_length` it says how long each form is. Its promise is
the same in both: what the long one adds is more points in time, more seeds and more of everything at once. With the
mark `ONLY` it is played in a soak alone.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")
SOAK_MINUTES = float(os.environ.get("FARM_SOAK_MINUTES", "0"))
"""Minutes for each test with the marker; 0 means the short forms."""


ONLY = pytest.mark.soak(only=True)
"""Marks what `make test` leaves out: a repeat of a promise that another test or parameter has there."""


def repeats(short: int, a_minute: int) -> int:
    """Return how often something is done: so often in `make test`, in a soak as often as its minutes have time for."""
    return max(short, round(a_minute * SOAK_MINUTES))


def at_length(short: T, long: T) -> T:
    """Return what `make test` takes, or what a soak does."""
    return long if SOAK_MINUTES else short

"""The long forms of tests: `make soak SOAK_MINUTES=M` runs each for about that long, `make test` runs the short forms.

A test with a long form has the marker `soak`; by `repeats` or `at_length` it states the length of each form. Both forms
test the same promise: the long one adds more points in time, more seeds and more load. With the mark `ONLY` a test runs
only in a soak.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")
SOAK_MINUTES = float(os.environ.get("FARM_SOAK_MINUTES", "0"))
"""Minutes for each test with the marker; 0 means the short forms."""


ONLY = pytest.mark.soak(only=True)
"""Marks tests that `make test` leaves out: they repeat a promise that another test or parameter has there."""


def repeats(short: int, a_minute: int) -> int:
    """Return the number of repeats: `short` in `make test`, in a soak as many as its minutes allow."""
    return max(short, round(a_minute * SOAK_MINUTES))


def at_length(short: T, long: T) -> T:
    """Return `short` in `make test`, `long` in a soak."""
    return long if SOAK_MINUTES else short

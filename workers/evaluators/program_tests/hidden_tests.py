"""The hidden tests of a program, as plain values: its inputs and the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StreamTest:
    """A test of a whole program: its standard input, and its expected standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A test of one function: its arguments and the accepted return values, mostly one."""

    arguments: Sequence[Any]
    expected: Sequence[Any]


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """The tests of one problem, all of one kind, and their limits.

    `function` is the name of the function, in `Solution` or in the module, for CallTests. `compare` is a mode of
    `output_comparison.py`, `checker` the program of that mode. `rule`, of `form_rules.py`, is that of a row's form;
    empty for other rows. `partial`: the score is the share of passed tests.
    """

    tests: Sequence[StreamTest | CallTest]
    function: str = ""
    compare: str = "lines"
    checker: str = ""
    rule: str = ""
    partial: bool = False
    time_s: float = 6.0
    memory_mb: int = 1024

"""A promise: one public statement about a sandbox, and the coroutine that finds out whether it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from workers.conformance.trial import PromiseTrial

TIME_S = 60.0
"""Seconds that a promise may take unless it says otherwise, starts of sandboxes included."""

Check: TypeAlias = Callable[[PromiseTrial], Awaitable[None]]
"""Raises AssertionError, with a message a user understands, if the promise is broken; NotTried if it has no answer."""


@dataclass(frozen=True, slots=True)
class Promise:
    """`group` is the module it is written in; `statement` is its docstring; `needs` are programs of the image.

    `surface` marks what authors of handlers and tools rely on, which a fake keeps too.
    """

    name: str
    group: str
    statement: str
    check: Check
    needs: tuple[str, ...] = ()
    surface: bool = False
    time_s: float = TIME_S


def promise(*needs: str, surface: bool = False, time_s: float = TIME_S) -> Callable[[Check], Promise]:
    """Make a promise of a coroutine function that takes a PromiseTrial; its docstring is the public statement."""

    def make(check: Check) -> Promise:
        group = check.__module__.rpartition(".")[2]
        statement = " ".join((inspect.getdoc(check) or "").split())
        if not statement:
            raise TypeError(f"{check.__name__} says nothing: write its promise as its docstring")
        return Promise(check.__name__, group, statement, check, needs, surface, time_s)

    return make

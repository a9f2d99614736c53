"""A promise: one public statement about a sandbox, and the coroutine that checks it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from workers.conformance.trial import PromiseTrial

TIME_S = 60.0
"""Default time limit of a promise in seconds, including the start of sandboxes."""

Check: TypeAlias = Callable[[PromiseTrial], Awaitable[None]]
"""Raises AssertionError, with a message for users, if the promise is broken; NotTried if it cannot be checked."""


@dataclass(frozen=True, slots=True)
class Promise:
    """`group` is the module that defines it; `statement` is its docstring; `needs` are programs of the image.

    `surface` marks promises that authors of handlers and tools rely on, and that a fake keeps, too.
    """

    name: str
    group: str
    statement: str
    check: Check
    needs: tuple[str, ...] = ()
    surface: bool = False
    time_s: float = TIME_S


def promise(*needs: str, surface: bool = False, time_s: float = TIME_S) -> Callable[[Check], Promise]:
    """Turn a coroutine function with a PromiseTrial parameter into a promise; its docstring is the public statement."""

    def make(check: Check) -> Promise:
        group = check.__module__.rpartition(".")[2]
        statement = " ".join((inspect.getdoc(check) or "").split())
        if not statement:
            raise TypeError(f"{check.__name__} has no docstring: write its promise there")
        return Promise(check.__name__, group, statement, check, needs, surface, time_s)

    return make

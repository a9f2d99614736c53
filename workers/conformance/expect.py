"""Assertions for promises, whose failures read as sentences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from workers.plugins.interfaces import CellResult, ExecResult, ShellResult

DEADLINE_S = 15.0
_SHOWN = 300


class NotTried(Exception):
    """A promise can be found neither kept nor broken here; the message says why."""


class NotPermitted(NotTried):
    """Trying a promise takes a right that this user does not have, and that nothing that is installed would give."""


def short(value: object) -> str:
    """A value as it fits into a sentence."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def same(found: object, wanted: object, what: str) -> None:
    """`found` is `wanted`; `what` is a noun phrase, such as "the exit code"."""
    assert found == wanted, f"{what} should be {short(wanted)} and is {short(found)}"


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """Check that the block raises an error of this kind, with all of the words in its message."""
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"{kind.__name__} should have been raised"
    missing = [word for word in words if word not in said]
    assert not missing, f"{kind.__name__} should name {', '.join(missing)} and says: {short(said)}"


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """The block ends in time; as its own error if it does not."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        assert not limit.expired(), f"it should be done within {seconds:.0f} s, and was not"
        raise


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = DEADLINE_S) -> None:
    """Check again and again, at most so long; `what` ends the sentence "waited in vain until"."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain until {what}"
        await asyncio.sleep(0.1)


async def until(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait for a condition of the node; `what` ends the sentence "waited in vain until".

    Looking for it takes a quarter of the time at most, so that what is waited for has the processors.
    """
    began = time.monotonic()
    deadline = began + within_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"waited {within_s:.0f} s in vain until {what}"
        await asyncio.sleep(max(0.02, 3 * (now - began)))
        began = time.monotonic()


def described(result: ExecResult | ShellResult | CellResult) -> str:
    """Everything a model could read in a result."""
    if isinstance(result, ExecResult):
        return (result.stdout + result.stderr).decode(errors="replace") + result.limit
    return result.output + result.limit + (result.error if isinstance(result, CellResult) else "")

"""Assertions for promises, whose failures read as sentences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from workers.plugins.interfaces import CellResult, ExecResult, ShellResult

DEADLINE_S = 15.0
_POLL_S = 0.1
_SHOWN = 300


class NotTried(Exception):
    """A promise cannot be checked here; the message tells why."""


class NotPermitted(NotTried):
    """Trying a promise needs a right that this user lacks, and that no installation would give."""


def short(value: object) -> str:
    """Return a value, shortened to fit into a sentence."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def same(found: object, wanted: object, what: str) -> None:
    """Check that `found` equals `wanted`; `what` is a noun phrase, such as "the exit code"."""
    assert found == wanted, f"{what} should be {short(wanted)} and is {short(found)}"


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """Check that the block raises an error of this kind, with all of the words in its message."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"{kind.__name__} should have been raised"
    missing = [word for word in words if word not in message]
    assert not missing, f"{kind.__name__} should name {', '.join(missing)} and says: {short(message)}"


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Fail if the block does not end in time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        assert not limit.expired(), f"it should be done within {seconds:.0f} s, and was not"
        raise


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = DEADLINE_S) -> None:
    """Check a condition repeatedly until it holds or the time is over; `what` ends the sentence "waiting until"."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"timed out after {within_s:.0f} s of waiting until {what}"
        await asyncio.sleep(_POLL_S)


async def until(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait for a condition of the node; `what` ends the sentence "waiting until".

    The checks take at most a quarter of the time, so that the awaited process gets the CPUs.
    """
    began = time.monotonic()
    deadline = began + within_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"timed out after {within_s:.0f} s of waiting until {what}"
        await asyncio.sleep(max(0.02, 3 * (now - began)))
        began = time.monotonic()


def described(result: ExecResult | ShellResult | CellResult) -> str:
    """Everything a model could read in a result."""
    if isinstance(result, ExecResult):
        return (result.stdout + result.stderr).decode(errors="replace") + result.limit
    return result.output + result.limit + (result.error if isinstance(result, CellResult) else "")

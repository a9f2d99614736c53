"""The one rule for calls into plug-ins: whatever comes out of one, but a cancellation from outside, is its failure.

Handlers, agents, tools, evaluators and sandboxes are other people's code, which may raise anything: an exception whose
text cannot be had, `SystemExit`, `GeneratorExit`, a cancellation of its own, a group of several. `fault_of`
turns each into one RolloutError that names the rollout and the call, so that it is counted like any other failure.
`stages.boundary` applies it to what waits and `call_plugin` to what does not; nothing else calls a plug-in.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from farm.errors import (
    AgentError,
    EngineError,
    EvaluatorError,
    FarmError,
    HandlerError,
    RolloutError,
    SandboxError,
    StaleRollout,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST = 2_000
_MAX_SHOWN = 3
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}
_KINDS = {each.kind for each in (AgentError, EngineError, EvaluatorError, HandlerError, SandboxError, StaleRollout)}
_NO_THREAD = "can't start new thread"


def described(error: BaseException) -> str:
    """An exception's type and text on one line of bounded length; never raises, whatever its `__str__` does."""
    # what a database driver says, without the statement and its values around it
    cause = getattr(error, "orig", None)
    inner = cause if isinstance(cause, BaseException) else error
    name = _safely(lambda: type(inner).__name__)
    if isinstance(inner, BaseExceptionGroup):
        leaves = list(_leaves(inner))
        shown = "; ".join(described(each) for each in leaves[:_MAX_SHOWN])
        return f"{name} of {len(leaves)}: {shown}"[:_LONGEST]
    text = " ".join(_safely(lambda: str(inner)[: 2 * _LONGEST]).split())
    return f"{name}: {text}"[:_LONGEST] if text else name


def _safely(ask: Callable[[], str]) -> str:
    try:
        return str(ask())
    except BaseException as error:
        return f"(its text cannot be had: {type(error).__name__})"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups in it, without recursion."""
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseExceptionGroup):
            waiting += reversed(each.exceptions)
        else:
            yield each


def is_cancellation(error: BaseException) -> bool:
    """Return whether the running task was cancelled from outside, and this is that cancellation."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def fault_of(error: BaseException, rollout_id: str, what: str, error_type: type[RolloutError]) -> RolloutError:
    """The RolloutError for what a plug-in raised: its own if it raised one, else an `error_type` that names the call.

    A group whose leaves are all RolloutErrors, as a TaskGroup makes them, is the first of them.
    """
    leaves = list(_leaves(error))
    own = [each for each in leaves if isinstance(each, RolloutError) and _is_known(each)]
    if own and len(own) == len(leaves):
        return _named(own[0], rollout_id)
    if isinstance(error, FarmError) and not isinstance(error, RolloutError):
        return error_type(f"{rollout_id}: {what}: {described(error).partition(': ')[2]}")
    if isinstance(error, asyncio.CancelledError):
        return error_type(f"{rollout_id}: {what} broke: it was cancelled from within")
    log.error("Rollout %s: %s failed: %s", rollout_id, what, described(error), exc_info=error)
    return error_type(f"{rollout_id}: {what} broke: {described(error)}")


def _is_known(error: RolloutError) -> bool:
    """Return whether its kind and its retry are valid: a plug-in may derive errors of its own, and get them wrong."""
    try:
        return bool(str(error) is not None and error.kind in _KINDS and isinstance(error.retryable, bool))
    except BaseException:
        return False


def _named(error: RolloutError, rollout_id: str) -> RolloutError:
    """The error if it names its rollout, else one like it that does: one object may be raised for many rollouts."""
    if rollout_id in str(error):
        return error
    named = type(error).__new__(type(error))
    named.__dict__.update(error.__dict__)
    named.args = (f"{rollout_id}: {error}",)
    return named


def call_plugin(rollout_id: str, what: str, error_type: type[RolloutError], ask: Callable[[], T]) -> T:
    """Call a plug-in that answers at once. Raises a RolloutError for whatever it raises."""
    try:
        return ask()
    except BaseException as error:
        raise fault_of(error, rollout_id, what, error_type) from error


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether the error means a process without threads, descriptors or memory, which no rollout caused.

    A MemoryError counts if the farm's own code raised it. One of a plug-in is its own failure, as it may request more
    than any machine has: a RolloutError stands before it in the chain.
    """
    by_plugin = False
    for _ in range(8):
        if error is None:
            return False
        by_plugin = by_plugin or isinstance(error, RolloutError)
        if isinstance(error, MemoryError) and not by_plugin:
            return True
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return True
        if isinstance(error, RuntimeError) and _NO_THREAD in described(error):
            return True
        error = error.__cause__ or error.__context__
    return False

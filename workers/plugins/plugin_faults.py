"""The rule for calls into plug-ins: any exception other than an external cancellation is a fault of the plug-in.

Handlers, agents, tools, evaluators and sandboxes are third-party code and may raise anything: an exception whose
`__str__` fails, `SystemExit`, `GeneratorExit`, a cancellation of their own, an exception group. `fault_of` turns each
into one RolloutError that names the rollout and the call, so that it is counted like any other failure. Plug-ins are
called only within `plugin_call`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

_LONGEST = 2_000
_MAX_SHOWN = 3
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}
_KINDS = {each.kind for each in (AgentError, EngineError, EvaluatorError, HandlerError, SandboxError, StaleRollout)}
_NO_THREAD = "can't start new thread"


def described(error: BaseException) -> str:
    """Return an exception's type and text on one line of bounded length; never raises, whatever its `__str__` does."""
    # Of a database error: the driver's message, without the statement and its values.
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
        return f"(its text is unavailable: {type(error).__name__})"


def _leaves(error: BaseException) -> Iterator[BaseException]:
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
    """Return a plug-in's exception as a RolloutError: its own if it raised one, else an `error_type` naming the call.

    Of a group of RolloutErrors only, as a TaskGroup raises it, return the first.
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
    """Return whether its kind and retry policy are valid; errors that a plug-in derives may get them wrong."""
    try:
        return bool(str(error) is not None and error.kind in _KINDS and isinstance(error.retryable, bool))
    except BaseException:
        return False


def _named(error: RolloutError, rollout_id: str) -> RolloutError:
    """Return the error with its rollout's id in the text; a copy, as one object may be raised for many rollouts."""
    if rollout_id in str(error):
        return error
    named = type(error).__new__(type(error))
    named.__dict__.update(error.__dict__)
    named.args = (f"{rollout_id}: {error}",)
    return named


@contextmanager
def plugin_call(rollout_id: str, what: str, error_type: type[RolloutError]) -> Iterator[None]:
    """Raise only RolloutErrors and external cancellations.

    Any other exception becomes an `error_type` that names `what`. `stages.boundary` adds a time limit for coroutines.
    """
    try:
        yield
    except BaseException as error:
        if is_cancellation(error):
            raise
        fault = fault_of(error, rollout_id, what, error_type)
        if fault is error:
            raise
        raise fault from error


def is_exhausted(error: BaseException | None) -> bool:
    """Return whether the process ran out of threads, descriptors or memory, which is never the rollout's fault.

    A MemoryError counts only if the farm's own code raised it. A plug-in may request more memory than any machine has;
    its MemoryError has a RolloutError before it in the chain and counts as the plug-in's failure.
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

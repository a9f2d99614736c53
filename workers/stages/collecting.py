"""Collecting what is to be scored from a sandbox in time, and finding out what made it slow if it takes longer.

The rule: what a handler collects within half of its limit from a fresh sandbox, prepared alike on the same node, and
within its limit from the policy's neither at once nor when it is tried again, was made slow by the policy. Then nothing
but its answer is scored, as if what it left could not be read. All else is a TimeoutError, which is tried again:
a control that is slow too, a machine that was late meanwhile, a limit that passes where there is no sandbox. The second
try may just as well succeed, and counts then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from farm.errors import FarmError, ToolError
from workers.evaluators.node_conditions import observed
from workers.plugins.interfaces import Sandbox, Submission
from workers.stage_clock import deadline, off_clock

log = logging.getLogger(__name__)

_CONTROL_SHARE = 0.5
_LATE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Collect:
    """A handler's `collect` and its limit; `fresh` opens a sandbox as prepared, which takes up to `start_s`."""

    collect: Callable[[Sandbox | None], Awaitable[Submission]]
    fresh: Callable[[], AbstractAsyncContextManager[Sandbox]]
    limit_s: float
    start_s: float

    async def within(self, limit_s: float, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """The submission; the answer alone if what is there cannot be read. TimeoutError, and what `collect` raises."""
        try:
            async with deadline(limit_s):
                return await self.collect(sandbox)
        except ToolError as error:
            where = sandbox.sandbox_id if sandbox is not None else "no sandbox"
            log.info("%s: files of the policy cannot be read: %s", where, error)
            return Submission(answer=answer)


async def collected(collect: Collect, sandbox: Sandbox | None, answer: str | None) -> Submission:
    """Return the submission. Raises TimeoutError if another cause makes it too slow, and what `collect` raises."""
    limit_s = collect.limit_s
    try:
        return await collect.within(limit_s, sandbox, answer)
    except TimeoutError as error:
        late = f"it took longer than {limit_s:g} s"
        if sandbox is None:
            raise TimeoutError(late) from error
    # finding the cause has limits of its own
    with off_clock(collect.start_s + 2 * limit_s):
        await _control(collect, answer, late)
        async with observed() as conditions:
            try:
                return await collect.within(limit_s, sandbox, answer)
            except TimeoutError:
                pass
        if conditions.late_s > _LATE_SHARE * limit_s:
            raise TimeoutError(f"{late}, while the machine was late by {conditions.late_s:.1f} s")
    log.warning("Sandbox %s was made slow by its policy: collecting %s, twice", sandbox.sandbox_id, late)
    return Submission(answer=answer)


async def _control(collect: Collect, answer: str | None, late: str) -> None:
    """Raise TimeoutError if a sandbox that the policy never touched is no better."""
    try:
        async with collect.fresh() as other:
            await collect.within(_CONTROL_SHARE * collect.limit_s, other, answer)
    except TimeoutError as error:
        raise TimeoutError(f"{late}, and nearly as long in a fresh sandbox") from error
    except FarmError as error:
        raise TimeoutError(f"{late}, and a fresh sandbox fails: {error}") from error

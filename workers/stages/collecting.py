"""Runs a handler's `collect` within its time limit, and attributes a timeout to the policy or to the farm.

The rule: the policy is at fault if `collect` takes at most half of its limit in a fresh sandbox, prepared alike on the
same node, but exceeds its limit in the policy's sandbox twice. Then only the answer is scored, as if the sandbox could
not be read. Any other case is a TimeoutError and retried: the fresh sandbox is slow too, the machine was overloaded
meanwhile, or there is no sandbox. If the second attempt succeeds, its submission counts.
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
    """A handler's `collect` and its limit; `fresh` opens a freshly prepared sandbox, which takes up to `start_s`."""

    collect: Callable[[Sandbox | None], Awaitable[Submission]]
    fresh: Callable[[], AbstractAsyncContextManager[Sandbox]]
    limit_s: float
    start_s: float

    async def within(self, limit_s: float, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Return the submission; only the answer if the sandbox is unreadable. Raises `collect`'s errors."""
        try:
            async with deadline(limit_s):
                return await self.collect(sandbox)
        except ToolError as error:
            where = sandbox.sandbox_id if sandbox is not None else "no sandbox"
            log.info("%s: files of the policy cannot be read: %s", where, error)
            return Submission(answer=answer)


async def collected(collect: Collect, sandbox: Sandbox | None, answer: str | None) -> Submission:
    """Return the submission. Raises TimeoutError if the policy did not make it slow, and `collect`'s errors."""
    limit_s = collect.limit_s
    try:
        return await collect.within(limit_s, sandbox, answer)
    except TimeoutError as error:
        late = f"it took longer than {limit_s:g} s"
        if sandbox is None:
            raise TimeoutError(late) from error
    # The diagnosis has its own time limit.
    with off_clock(collect.start_s + 2 * limit_s):
        await _control(collect, answer, late)
        async with observed() as conditions:
            try:
                return await collect.within(limit_s, sandbox, answer)
            except TimeoutError:
                pass
        if conditions.late_s > _LATE_SHARE * limit_s:
            raise TimeoutError(f"{late}, while the machine stalled for {conditions.late_s:.1f} s")
    log.warning("Sandbox %s was made slow by its policy: collecting %s, twice", sandbox.sandbox_id, late)
    return Submission(answer=answer)


async def _control(collect: Collect, answer: str | None, late: str) -> None:
    """Raise TimeoutError if a sandbox that the policy never touched is slow or fails too."""
    try:
        async with collect.fresh() as other:
            await collect.within(_CONTROL_SHARE * collect.limit_s, other, answer)
    except TimeoutError as error:
        raise TimeoutError(f"{late}, and nearly as long in a fresh sandbox") from error
    except FarmError as error:
        raise TimeoutError(f"{late}, and a fresh sandbox fails: {error}") from error

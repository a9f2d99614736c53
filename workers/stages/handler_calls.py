"""Calls of a handler during the run stage: for the next step's messages, and for the submission.

A timeout of `collect` is attributed to the policy or to the farm by this rule: the policy is at fault if `collect`
takes at most half of its limit in a fresh sandbox, prepared alike on the same node, but exceeds its limit in the
policy's sandbox twice. Then only the answer is scored, as if the sandbox could not be read. Any other case is a
TimeoutError and retried: the fresh sandbox is slow too, the machine was overloaded meanwhile, or there is no sandbox.
If the second attempt succeeds, its submission counts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from farm.errors import FarmError, HandlerError, ToolError
from farm.records.rollout import STEP_ENDS
from farm.records.trajectory import Message
from workers.evaluators.node_conditions import observed
from workers.plugins import plugin_values
from workers.plugins.interfaces import AgentResult, FreshSandbox, Sandbox, Submission
from workers.stage_clock import deadline, off_clock
from workers.stages.stage_job import Problem, boundary

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
    log.warning("Submission not collected: sandbox %s is slowed by its policy: %s, twice", sandbox.sandbox_id, late)
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


class TaskSteps:
    """The steps of one rollout. `records` are the handler's records of all ended steps except the last."""

    def __init__(self, problem: Problem, sandbox: Sandbox | None, fresh: FreshSandbox) -> None:
        self._problem = problem
        self._sandbox = sandbox
        self._fresh = fresh
        self._n_requested = 0
        self._ended = False
        self.records: list[dict[str, Any]] = []

    async def next_messages(self, n_done: int, answer: str | None) -> Sequence[Message]:
        """Return the next step's messages, none after the last; off the policy's clock. Raises HandlerError."""
        job = self._problem.job
        what, limit_s = "the handler's next_messages()", job.limits.eval_s
        with off_clock(limit_s):
            async with boundary(job, what, HandlerError, limit_s):
                turn = await self._problem.handler.next_messages(
                    self._sandbox, n_done, answer, tuple(self.records), self._fresh
                )
        turn = plugin_values.next_turn(turn, f"{job.rollout_id}: {what}")
        self._n_requested = n_done
        self._ended = not turn.messages
        if turn.record:
            self.records.append(turn.record)
        return turn.messages

    async def finish(self, result: AgentResult, agent_name: str) -> None:
        """Check that the agent has run all steps. Raises HandlerError, not retryable, if it ran only the first."""
        if result.outcome not in STEP_ENDS or self._ended:
            return
        if await self.next_messages(self._n_requested + 1, result.answer):
            raise HandlerError(
                f"{self._problem.job.rollout_id}: the task has several steps, and agent {agent_name} runs only one: "
                "choose another agent, such as react",
                retryable=False,
            )

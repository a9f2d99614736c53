"""The steps of a task with several steps in one conversation: requested from its handler, and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farm.errors import HandlerError
from farm.records.rollout import STEP_ENDS
from farm.records.trajectory import Message
from workers.plugins import plugin_values
from workers.plugins.interfaces import AgentResult, FreshSandbox, Sandbox
from workers.stage_clock import off_clock
from workers.stages.stage_boundary import boundary
from workers.stages.stage_job import Problem


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

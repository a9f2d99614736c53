"""Observations: the answers to actions. After any error it is `valid=false` and shows the policy nothing.

An action that is repeated after a broken connection is joined, or answered from its sandbox's memory, and executed
once. The same action in a later turn is a new one. So the sandbox is told to forget an action when its client is
connected to receive the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from farm.api.endpoints import Endpoints
from farm.api.schemas import ApiRequest
from farm.api.verl_tool.observation_requests import ObservationRequest, TrajectoryStep
from farm.api.verl_tool.tool_actions import USAGE, ToolAction, action_of, shown
from farm.api.verl_tool.trajectory_sandboxes import TrajectorySandboxes
from farm.client import serialization
from farm.client.request_checks import checked
from farm.client.sandboxes.node_line import SentCall
from farm.errors import Conflict, FarmError, InvalidRequest, NotFound, SandboxEnded, ServiceError
from farm.records.lending.sandbox_calls import CALL_S, ForgetCall, SandboxToolCall, ToolResult
from farm.settings import settings

T = TypeVar("T")
log = logging.getLogger(__name__)

_OUTAGES = (ServiceError, SandboxEnded, NotFound, InvalidRequest, Conflict)
"""Errors of a sandbox or its node in place of a result; requests of clients were validated before."""


@dataclass(slots=True)
class ActionObservation:
    """The answer to one action, with the sandbox that was called for it, if any."""

    shown: str | dict[str, Any]
    done: bool
    valid: bool
    sandbox_id: str = ""
    queued_s: float = 0.0


_Answered: TypeAlias = list[tuple[TrajectoryStep, ActionObservation]]
"""The steps of one trajectory in a request, with their observations."""


class Observations:
    """Answers requests for observations, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._sandboxes = TrajectorySandboxes(endpoints)
        self.n_active = 0

    async def answer(self, request: ApiRequest) -> dict[str, Any]:
        """Return the observations of a request. If a part of it is refused, nothing is executed."""
        steps = request.parse_body(ObservationRequest).steps()
        for step in steps:
            self._sandboxes.check(step)
        clock = asyncio.get_running_loop().time
        began = clock()
        self.n_active += 1
        try:
            by_trajectory = await self._of_all(steps)
            if not await request.is_disconnected():
                await _all([self._settle(mine) for mine in by_trajectory])
        finally:
            self.n_active -= 1
        answers = {id(step): observation for mine in by_trajectory for step, observation in mine}
        observations = [answers[id(step)] for step in steps]
        queued_s = max(each.queued_s for each in observations)
        return {
            "observations": [each.shown for each in observations],
            "dones": [each.done for each in observations],
            "valids": [each.valid for each in observations],
            "processing_time_ms": 1000 * max(0.0, clock() - began - queued_s),
            "queue_time_ms": 1000 * queued_s,
        }

    async def _of_all(self, steps: Sequence[TrajectoryStep]) -> list[_Answered]:
        """Return the observations of each trajectory, made one after the other; trajectories run concurrently."""
        by_trajectory: defaultdict[str, list[TrajectoryStep]] = defaultdict(list)
        for step in steps:
            by_trajectory[step.trajectory_id].append(step)

        async def of_one(mine: Sequence[TrajectoryStep]) -> _Answered:
            return [(step, await self._of(step)) for step in mine]

        return await _all([of_one(mine) for mine in by_trajectory.values()])

    async def _of(self, step: TrajectoryStep) -> ActionObservation:
        action = None if step.finishes else action_of(step.action)
        try:
            if step.finishes:
                await self._sandboxes.finish(step)
                return ActionObservation("", done=True, valid=True)
            if action is None:
                reason = "No valid tool found for action"
                return ActionObservation({"obs": "", "invalid_reason": reason, "available_tools": USAGE}, False, False)
            if action.tool == "answer":
                return ActionObservation("", done=True, valid=False)
            return await self._acted(step, action)
        except _OUTAGES as error:
            return _outage(step, error)

    async def _acted(self, step: TrajectoryStep, action: ToolAction) -> ActionObservation:
        limit_s = settings().verl_tool_action_s
        try:
            values = {"name": action.tool, "arguments": dict(action.arguments), "timeout_s": limit_s}
            call = checked(SandboxToolCall, values)
        except InvalidRequest as error:
            # caused by the policy: too long, or not text
            return ActionObservation({"obs": "", "invalid_reason": str(error)}, done=False, valid=False)
        clock = asyncio.get_running_loop().time
        began = clock()
        sandbox_id = await self._sandboxes.ready(step)
        queued_s = clock() - began
        sent = SentCall("tool", serialization.written(call), limit_s, step.call_id, needs_state=True)
        result = serialization.read(ToolResult, await self._endpoints.nodes.call(sandbox_id, sent))
        text = shown(step.action, action, result.text)
        return ActionObservation(text, result.done, not result.refused, sandbox_id, queued_s)

    async def _settle(self, answered: _Answered) -> None:
        """Forget the answered actions of a trajectory, or end its sandbox after its last step."""
        began = max((index + 1 for index, (step, _) in enumerate(answered) if step.finishes), default=0)
        in_sandbox = [each for each in answered[began:] if each[1].sandbox_id]
        try:
            if any(step.is_last for step, _ in answered[began:]):
                await self._sandboxes.finish(answered[0][0])
            elif in_sandbox:
                forget = ForgetCall(call_ids=[step.call_id for step, _ in in_sandbox])
                sent = SentCall("forget", serialization.written(forget), CALL_S)
                await self._endpoints.nodes.call(in_sandbox[-1][1].sandbox_id, sent)
        except _OUTAGES as error:
            # the next repeat would be answered by the result of this one
            for step, observation in in_sandbox:
                lost = _outage(step, error)
                observation.shown, observation.done, observation.valid = lost.shown, lost.done, lost.valid


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of these to their end. Raises the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _outage(step: TrajectoryStep, error: FarmError) -> ActionObservation:
    message = f"trajectory {step.trajectory_id}: {error}"
    log.warning("No observation: %s", message)
    return ActionObservation({"obs": "", "error": message}, done=True, valid=False)

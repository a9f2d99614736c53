"""The sandboxes of trajectories: each is borrowed under its trajectory's id, by which any API process finds it.

A sandbox that ended by its lease or with its node is not replaced: the work of the trajectory is lost, and an
observation of an empty sandbox would be wrong.
"""

from __future__ import annotations

import asyncio
from functools import partial

from farm.api.endpoints import Endpoints, LongPoll
from farm.api.schemas import RequestRejected
from farm.api.verl_tool.observation_requests import TrajectoryStep
from farm.client.http_errors import ProblemDetails
from farm.errors import Overloaded
from farm.records.lending.borrowed_sandbox import BorrowedSandbox, BorrowRequest, SandboxState
from farm.settings import settings

_PREFIX = "verl-tool:"
_POLL_S = 2.0
_PAUSE_S = 1.0


class TrajectorySandboxes:
    """The sandboxes that clients of this protocol have, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._borrower = endpoints.farm.sandboxes

    def check(self, step: TrajectoryStep) -> None:
        """Raise InvalidRequest for an unavailable kind of sandbox."""
        self._borrower.check(_request(step))

    async def ready(self, step: TrajectoryStep) -> str:
        """Return the id of a trajectory's sandbox once it runs; a new trajectory gets a new one.

        Raises SandboxEnded for one that was lost, Overloaded if there is no capacity for too long, and RequestRejected
        if this API ends.
        """
        wait_s = settings().verl_tool_wait_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            try:
                state = await self._endpoints.run(self._found_or_begun, step)
                break
            except Overloaded:
                self._check_open()
                if clock() > deadline:
                    raise
                await asyncio.sleep(_PAUSE_S)
        if _is_pending(state):
            ask = partial(self._borrower.get, state.sandbox_id)
            left_s = deadline - clock()
            wanted = LongPoll(state.sandbox_id, ask, lambda now: not _is_pending(now), left_s, _POLL_S)
            state = await self._endpoints.wait_until(wanted)
        if state.ended:
            raise state.ended_error()
        if _is_pending(state):
            self._check_open()
            raise Overloaded(f"sandbox {state.sandbox_id} is still {state.state} after {wait_s:g} s")
        return state.sandbox_id

    def _found_or_begun(self, step: TrajectoryStep) -> BorrowedSandbox:
        newest = self._borrower.newest_named(_name(step))
        if newest is None or (newest.ended and newest.finished):
            return self._borrower.begin(_request(step))
        return newest

    def _check_open(self) -> None:
        if self._endpoints.is_closed:
            ends = "this API ends: send the same request again"
            raise RequestRejected(ProblemDetails(503, "ServiceError", ends))

    async def finish(self, step: TrajectoryStep) -> None:
        """End the sandbox of a trajectory, if it has one; then its id may begin another."""
        await self._endpoints.run(self._borrower.finish_named, _name(step))

    def counts(self) -> dict[str, int]:
        """Return the number of waiting, starting and running sandboxes."""
        return {state.value: n for state, n in self._borrower.counts(_PREFIX).items()}


def _name(step: TrajectoryStep) -> str:
    return f"{_PREFIX}{step.trajectory_id}"


def _request(step: TrajectoryStep) -> BorrowRequest:
    return BorrowRequest(spec=step.spec, lease_s=settings().verl_tool_lease_s, name=_name(step))


def _is_pending(state: BorrowedSandbox) -> bool:
    return state.state in (SandboxState.WAITING, SandboxState.STARTING)

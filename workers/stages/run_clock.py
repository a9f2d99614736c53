"""Time limits of stages: the deadline of a running agent, and its cancellation."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from farm.records.request import Limits
from farm.records.rollout import Stage
from workers.plugins.interfaces import AgentResult, Policy
from workers.plugins.plugin_faults import described
from workers.stage_clock import stopped_s

log = logging.getLogger(__name__)

_MIN_WAIT_S = 0.05
_MAX_WAIT_S = 2.0
_WAIT_TIMEOUT_S = 30.0
"""Seconds that a cancelled agent may take to clean up before it is cancelled again."""
_LATE_S = 1.0
"""Delay from which on the process counts as frozen or blocked; that time is not the policy's."""
_GRACE_PERIOD_S = 30.0
"""Seconds that an evaluator may exceed its limit, to report the timeout itself, before it counts as broken."""


def limit_s(stage: Stage, limits: Limits) -> float:
    """Return the stage's time limit in seconds; it holds if every plug-in keeps to its own limit."""
    if stage is Stage.INIT:
        return limits.init_s
    if stage is Stage.RUN:
        return limits.run_s + limits.tool_s
    return limits.init_s + limits.eval_s + _GRACE_PERIOD_S


async def in_time(agent_run: asyncio.Future[AgentResult], limit_s: float, policy: Policy) -> bool:
    """Return whether the agent ended within the limit.

    Not counted: pauses of engines for new weights, times when this process was blocked or suspended, and times when the
    stage's clock was paused.
    """

    def excused_s() -> float:
        return policy.paused_s + stopped_s()

    deadline = time.monotonic() + limit_s - excused_s()
    while not agent_run.done():
        now = time.monotonic()
        left_s = deadline + excused_s() - now
        if left_s <= 0:
            return False
        wait_s = min(max(left_s, _MIN_WAIT_S), _MAX_WAIT_S)
        await asyncio.wait([agent_run], timeout=wait_s)
        late_s = time.monotonic() - now - wait_s
        deadline += late_s if late_s > _LATE_S else 0.0
    return True


async def ended(agent_run: asyncio.Future[Any], rollout_id: str, patience_s: float = _WAIT_TIMEOUT_S) -> None:
    """Cancel it until it has ended, as an agent may swallow a cancellation. Its exception is only logged."""
    while not agent_run.done():
        agent_run.cancel()
        done, _ = await asyncio.wait([agent_run], timeout=patience_s)
        if not done:
            log.warning("Rollout %s: agent has not ended %g s after its cancellation", rollout_id, patience_s)
    if not agent_run.cancelled() and (error := agent_run.exception()) is not None:
        log.debug("Rollout %s: agent ended with %s", rollout_id, described(error))

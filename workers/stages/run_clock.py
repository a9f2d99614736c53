"""The limits of stages, the deadline of a rollout that is played, and the end of what is beyond it."""

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
"""Seconds for an agent to clean up after itself, before it is cancelled once more."""
_LATE_S = 1.0
"""Seconds of delay beyond which the process was frozen, or its loop blocked: that is not the policy's time."""
_GRACE_PERIOD_S = 30.0
"""Seconds for an evaluator beyond its limit, to report the limit itself, before it counts as broken."""


def limit_s(stage: Stage, limits: Limits) -> float:
    """The time by its clock after which a stage ends by itself, if all that it waits for heeds its own limits."""
    if stage is Stage.INIT:
        return limits.init_s
    if stage is Stage.RUN:
        return limits.run_s + limits.tool_s
    return limits.init_s + limits.eval_s + _GRACE_PERIOD_S


async def in_time(play: asyncio.Future[AgentResult], limit_s: float, policy: Policy) -> bool:
    """Return whether it ended within the limit; time in which engines were paused for new weights does not count.

    Nor does time in which nothing in this process could go on, or in which the stage's clock stands still.
    """

    def excused_s() -> float:
        return policy.paused_s + stopped_s()

    deadline = time.monotonic() + limit_s - excused_s()
    while not play.done():
        now = time.monotonic()
        left_s = deadline + excused_s() - now
        if left_s <= 0:
            return False
        wait_s = min(max(left_s, _MIN_WAIT_S), _MAX_WAIT_S)
        await asyncio.wait([play], timeout=wait_s)
        late_s = time.monotonic() - now - wait_s
        deadline += late_s if late_s > _LATE_S else 0.0
    return True


async def ended(play: asyncio.Future[Any], rollout_id: str, patience_s: float = _WAIT_TIMEOUT_S) -> None:
    """Cancel it until it has ended, as an agent may swallow a cancellation. What it raises then goes no further."""
    while not play.done():
        play.cancel()
        done, _ = await asyncio.wait([play], timeout=patience_s)
        if not done:
            log.warning("Rollout %s: agent has not ended %g s after its cancellation", rollout_id, patience_s)
    if not play.cancelled() and (error := play.exception()) is not None:
        log.debug("Rollout %s: agent ended with %s", rollout_id, described(error))

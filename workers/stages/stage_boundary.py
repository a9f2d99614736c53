"""Turns any exception in a stage into an error of `farm/errors.py`.

The rule for plug-ins is in `workers/plugins/plugin_faults.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import RolloutError
from workers.plugins.plugin_faults import described, fault_of, is_cancellation
from workers.stage_clock import deadline
from workers.stages.stage_job import StageJob


@asynccontextmanager
async def boundary(
    job: StageJob, what: str, error_type: type[RolloutError], limit_s: float | None = None
) -> AsyncIterator[None]:
    """Raise only RolloutErrors and external cancellations: any other exception becomes an `error_type` that names the
    rollout and `what` was done. `limit_s` is measured by the stage's clock.
    """
    try:
        async with deadline(limit_s):
            yield
    except TimeoutError as error:
        limit = f" took longer than {limit_s:g} s" if limit_s is not None else f" timed out: {described(error)}"
        raise error_type(f"{job.rollout_id}: {what}{limit}") from error
    except BaseException as error:
        if is_cancellation(error):
            raise
        fault = fault_of(error, job.rollout_id, what, error_type)
        if fault is error:
            raise
        raise fault from error

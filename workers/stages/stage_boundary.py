"""Calls of plug-ins by coroutines, with a time limit. The rule for their faults is in `plugin_faults.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import RolloutError
from workers.plugins.plugin_faults import described, plugin_call
from workers.stage_clock import deadline
from workers.stages.stage_job import StageJob


@asynccontextmanager
async def boundary(
    job: StageJob, what: str, error_type: type[RolloutError], limit_s: float | None = None
) -> AsyncIterator[None]:
    """Call a plug-in as in `plugin_call`, within `limit_s` seconds by the stage's clock."""
    with plugin_call(job.rollout_id, what, error_type):
        try:
            async with deadline(limit_s):
                yield
        except TimeoutError as error:
            limit = f" took longer than {limit_s:g} s" if limit_s is not None else f" timed out: {described(error)}"
            raise error_type(f"{job.rollout_id}: {what}{limit}") from error

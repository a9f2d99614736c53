"""Health checks of a task: a command that must succeed before the policy begins, repeated by Docker's rules."""

from __future__ import annotations

import asyncio
import time

from farm.errors import HandlerError
from farm.tasks.harbor_config import HealthcheckTable
from workers.plugins.interfaces import Sandbox

_SHOWN = 300


async def await_healthy(sandbox: Sandbox, check: HealthcheckTable, what: str) -> None:
    """Return once the command has succeeded. Raises HandlerError after `retries` failures past its start period."""
    grace_until = time.monotonic() + check.start_period_sec
    n_failures = 0
    while True:
        in_grace = time.monotonic() < grace_until
        result = await sandbox.exec(["/bin/bash", "-c", check.command], timeout_s=check.timeout_sec)
        if result.code == 0:
            return
        n_failures += not in_grace
        if n_failures >= check.retries:
            output = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-_SHOWN:]
            end = "timed out" if result.timed_out else f"ended with {result.code}"
            raise HandlerError(f"{what}: its health check {check.command!r} {end} {n_failures} times: {output}")
        await asyncio.sleep(check.start_interval_sec if in_grace else check.interval_sec)

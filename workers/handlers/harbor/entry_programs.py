"""The entry program of a container of a task's image: ENTRYPOINT of its Dockerfile, as Docker runs it.

Harbor gives it the command `sh -c "sleep infinity"`, or that of the task's compose file. It runs while the policy
works, with all that it starts.

A health check is a command that must succeed before the policy begins, repeated by Docker's rules.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Sequence
from typing import Literal

from farm.errors import HandlerError
from farm.plugins import follows
from farm.tasks.harbor_config import HealthcheckTable
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.dockerfile.image_config import Healthcheck, ImageConfig
from workers.sandboxes.optional_protocols import HasImageConfig, HasUsers

log = logging.getLogger(__name__)

COMMAND = ("sh", "-c", "sleep infinity")
"""Harbor's own command of the main service."""
_START = '"$@" </dev/null >/dev/null 2>&1 & sleep 0.3; kill -0 $! 2>/dev/null || wait $!'
"""Starts a long-running program; has the exit code of one that fails at once."""
_START_S = 30.0
_POLL_S = 1.0
"""Seconds between two health checks before a failure counts."""
_SHOWN = 300


async def begin(
    sandbox: Sandbox,
    what: str,
    entrypoint: Sequence[str] = (),
    command: Sequence[str] = (),
    healthcheck: HealthcheckTable | Literal["none"] | None = None,
) -> None:
    """Start a container's entry program, unless it only waits; then wait until the container is healthy.

    `entrypoint`, `command` and `healthcheck` are those of a compose file; HEALTHCHECK of the image counts if that has
    none and a program runs. Raises HandlerError if the health check fails.
    """
    config = sandbox.image_config() if follows(sandbox, HasImageConfig) else ImageConfig()
    argv = (*(entrypoint or _words(config)), *(command or COMMAND))
    check = None if healthcheck == "none" else healthcheck
    if argv != COMMAND and healthcheck is None and config.healthcheck:
        check = _table(config.healthcheck)
    if argv == COMMAND and check is None:
        return
    user_sandbox = await asyncio.to_thread(sandbox.as_user, "") if follows(sandbox, HasUsers) else sandbox
    if argv != COMMAND:
        await _start(user_sandbox, what, argv, config.workdir)
    if check is not None:
        await await_healthy(user_sandbox, check, what)


async def _start(sandbox: Sandbox, what: str, argv: Sequence[str], workdir: str) -> None:
    result = await sandbox.exec(
        ["/bin/bash", "--noprofile", "--norc", "-c", _START, "entrypoint", *argv],
        timeout_s=_START_S,
        cwd=workdir or None,
    )
    if result.code != 0:
        # As in Harbor's other environments, the policy works without it.
        log.warning("%s: entry point %s ended with %s", what, argv[0], result.code)


def _words(config: ImageConfig) -> Sequence[str]:
    entrypoint = config.entrypoint or []
    return [*config.shell, entrypoint] if isinstance(entrypoint, str) else entrypoint


def _table(check: Healthcheck) -> HealthcheckTable:
    """Return a Dockerfile's check: Docker first checks after an interval, so earlier failures do not count."""
    interval_s = check.interval_s or Healthcheck("").interval_s
    return HealthcheckTable(
        command=check.command if isinstance(check.command, str) else shlex.join(check.command),
        interval_sec=interval_s,
        timeout_sec=check.timeout_s or Healthcheck("").timeout_s,
        start_period_sec=check.start_period_s + interval_s,
        start_interval_sec=_POLL_S,
        retries=check.retries or Healthcheck("").retries,
    )


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

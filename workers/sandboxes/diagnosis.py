"""Diagnose a broken sandbox: find out whether a program inside it caused the failure.

A program inside broke the sandbox if the first process is alive and basic operations fail repeatedly, while the same
operations work in a fresh sandbox of the same spec on the same node. The same holds for a sandbox that fails after it
has reached its limits. Every other failure is the farm's fault: the first process has ended (no program inside can end
it), a retry succeeds, or a fresh sandbox fails, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from farm.errors import FarmError
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.sandbox import NodeSandbox

log = logging.getLogger(__name__)

TRY_S = 30.0


async def broken_from_within(
    sandbox: Sandbox | None, fresh: Callable[[], AbstractAsyncContextManager[Sandbox]], *, kernel: bool
) -> bool:
    """Return whether a program in the sandbox caused its failure. With `kernel`, an interpreter must work, too.

    False for sandboxes of other providers, which cannot be diagnosed.
    """
    if not isinstance(sandbox, NodeSandbox) or not sandbox.alive():
        return False
    why = await _trouble(sandbox, kernel)
    if not why:
        return sandbox.alive() and bool(sandbox.limits_reached())
    try:
        async with fresh() as other:
            control = await _trouble(other, kernel)
    except FarmError as error:
        control = str(error)
    log.info("Sandbox %s: %s; in a fresh sandbox: %s", sandbox.sandbox_id, why, control or "no error")
    return not control and sandbox.alive()


async def _trouble(sandbox: Sandbox, kernel: bool) -> str:
    """Return why a command, a shell or an interpreter does not start; empty if all of them work."""
    try:
        async with asyncio.timeout(TRY_S):
            result = await sandbox.exec(["bash", "-c", "true"], timeout_s=TRY_S)
            if result.code != 0:
                return f"bash ended with {result.code}: {result.stderr[-200:]!r}"
            shell = await sandbox.open_shell()
            await shell.close()
            if kernel:
                interpreter = await sandbox.open_kernel()
                await interpreter.close()
    except (FarmError, TimeoutError) as error:
        return str(error) or f"nothing within {TRY_S:.0f} s"
    return ""

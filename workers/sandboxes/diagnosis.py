"""The diagnosis of a sandbox that cannot be used any more: whether what ran in it broke it.

The rule: a sandbox whose first process lives, in which the plainest things fail again and again, while they work in a
fresh one of the same spec on the same node, was broken by what ran in it. So was one that fails and has reached its
limits. All else is the farm's fault: a first process that has ended, which nothing inside can bring about; what works
when it is tried again; what fails in a fresh sandbox, too.
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
    """Return whether what ran in the sandbox is the reason that it failed; `kernel` if it needs an interpreter, too.

    False for other kinds of sandbox, of which it cannot be found out.
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
    """Return why a command, a shell or an interpreter cannot be had; empty if they can."""
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

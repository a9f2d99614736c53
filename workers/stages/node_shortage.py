"""The rule that no shortage of a node is scored, for the run and eval stages; see `sandboxes/shortage.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import EngineError, RolloutError, StaleRollout
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.shortage import ShortageWindow, exhausted, watched


class NodeHealth:
    """The node during one stage of one rollout, and the sandboxes used there."""

    def __init__(self, window: ShortageWindow) -> None:
        self._window = window
        self._in_use: list[NodeSandbox] = []

    def use_policy_sandbox(self, sandbox: Sandbox | None) -> None:
        """Use the policy's sandbox; a disk that it fills itself is not a shortage of the node."""
        self.use(sandbox)
        if isinstance(sandbox, NodeSandbox) and (use := sandbox.disk_use()) is not None:
            self._window.follow(use)

    def use(self, sandbox: Sandbox | None) -> None:
        """Also monitor the node's disk, where the sandbox's files are."""
        if sandbox is not None:
            self._window.on_disk = True
        if isinstance(sandbox, NodeSandbox):
            self._in_use.append(sandbox)

    @asynccontextmanager
    async def using(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Use a sandbox in the block, which must end before the sandbox is stopped."""
        self.use(sandbox)
        try:
            yield
        finally:
            self._leave(sandbox)

    def _leave(self, sandbox: Sandbox) -> None:
        # Read now: a stopped sandbox no longer reports which limits it reached.
        if isinstance(sandbox, NodeSandbox):
            self._in_use.remove(sandbox)
            self._window.excuse(sandbox.limits_reached())

    def shortage(self) -> str:
        """Return the resource that the node ran short of, unless these sandboxes caused it; empty if none."""
        for sandbox in list(self._in_use):
            self._leave(sandbox)
        return self._window.reason()


@asynccontextmanager
async def healthy_node(
    config: SandboxConfig, rollout_id: str, what: str, error_type: type[RolloutError]
) -> AsyncIterator[NodeHealth]:
    """Raise `error_type` in place of the block's result or error if the node ran short meanwhile.

    Engine errors and errors of changed weights propagate unchanged, as they are no results.
    """
    with watched(config) as window, window.as_current():
        node_health = NodeHealth(window)
        try:
            yield node_health
        except (EngineError, StaleRollout):
            raise
        except Exception as error:
            if why := exhausted(error) or node_health.shortage():
                raise error_type(f"{rollout_id}: {what} does not count: the node ran short: {why}") from error
            raise
        if why := node_health.shortage():
            raise error_type(f"{rollout_id}: {what} does not count: the node ran short: {why}")

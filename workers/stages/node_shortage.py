"""The rule that no shortage of a node is scored, around playing and around scoring; see `sandboxes/shortage.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from farm.errors import EngineError, RolloutError, StaleRollout
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.shortage import ShortageWindow, exhausted, watched


class NodeHealth:
    """The node during one stage of one rollout, and the sandboxes that were used there."""

    def __init__(self, window: ShortageWindow) -> None:
        self._window = window
        self._in_use: list[NodeSandbox] = []

    def play_in(self, sandbox: Sandbox | None) -> None:
        """Use it; a disk that it fills by itself is no shortage of the node."""
        self.use(sandbox)
        if isinstance(sandbox, NodeSandbox) and (use := sandbox.disk_use()) is not None:
            self._window.follow(use)

    def use(self, sandbox: Sandbox | None) -> None:
        """Count the node's disk, too, as the sandbox lies on it."""
        if sandbox is not None:
            self._window.on_disk = True
        if isinstance(sandbox, NodeSandbox):
            self._in_use.append(sandbox)

    @asynccontextmanager
    async def using(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Use it in the block, which ends before it is stopped."""
        self.use(sandbox)
        try:
            yield
        finally:
            self._leave(sandbox)

    def _leave(self, sandbox: Sandbox) -> None:
        # once it is stopped the limits it had reached are lost
        if isinstance(sandbox, NodeSandbox):
            self._in_use.remove(sandbox)
            self._window.excuse(sandbox.limits_reached())

    def shortage(self) -> str:
        """Return what the node has run short of so far, in words, unless these sandboxes caused it."""
        for sandbox in list(self._in_use):
            self._leave(sandbox)
        return self._window.reason()


@asynccontextmanager
async def healthy_node(rollout_id: str, what: str, error_type: type[RolloutError]) -> AsyncIterator[NodeHealth]:
    """Raise `error_type` for whatever came of the block, a result or an error, if the node ran short meanwhile.

    An engine's error and one of weights that moved on are left as they are: they are no result.
    """
    with watched() as window, window.as_current():
        node_health = NodeHealth(window)
        try:
            yield node_health
        except (EngineError, StaleRollout):
            raise
        except Exception as error:
            if why := exhausted(error) or node_health.shortage():
                raise error_type(f"{rollout_id}: {what} counts for nothing on a node that ran short: {why}") from error
            raise
        if why := node_health.shortage():
            raise error_type(f"{rollout_id}: {what} counts for nothing on a node that ran short: {why}")

"""The first stage of a rollout on a node: run, if its kind needs no sandbox there, else init."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from farm.records.node import Node
from farm.records.rollout import Stage
from farm.store import batches
from farm.store.placement import QueuedStage


class FirstStages:
    """Knows which data sources the nodes run without a sandbox, and the batches whose agent may need one."""

    def __init__(self) -> None:
        self._without: dict[str, frozenset[str]] = {}
        self._agents: dict[str, str] = {}

    def note(self, up: Sequence[Node]) -> None:
        """Update the nodes that are up."""
        self._without = {node.node: node.without_sandbox for node in up if node.without_sandbox}

    def forget(self, but: Collection[str]) -> None:
        """Forget batches that no longer wait."""
        self._agents = {batch_id: agent for batch_id, agent in self._agents.items() if batch_id in but}

    def of(self, connection: Connection, batch_id: str, queued: QueuedStage, node: str) -> Stage:
        """Return the stage that a rollout begins with. A retried one always begins with init."""
        if queued.stage is not Stage.INIT or queued.attempt > 1:
            return queued.stage
        if queued.data_source not in self._without.get(node, ()):
            return Stage.INIT
        if batch_id not in self._agents:
            self._agents[batch_id] = batches.request_of(connection, batch_id).get("agent") or ""
        return Stage.INIT if self._agents[batch_id] else Stage.RUN

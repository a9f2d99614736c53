"""The stage that a rollout begins with on a node: run, if none of its kind needs a sandbox there, so init none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from farm.records.node import Node
from farm.records.rollout import Stage
from farm.store import batches
from farm.store.placement import QueuedStage


class FirstStages:
    """Knows which data sources the nodes play without a sandbox, and the batches whose agent may want one."""

    def __init__(self) -> None:
        self._without: dict[str, frozenset[str]] = {}
        self._agents: dict[str, str] = {}

    def note(self, up: Sequence[Node]) -> None:
        """Take note of the nodes that are up."""
        self._without = {node.node: node.without_sandbox for node in up if node.without_sandbox}

    def forget(self, but: Collection[str]) -> None:
        """Forget the batches that do not wait any more."""
        self._agents = {batch_id: agent for batch_id, agent in self._agents.items() if batch_id in but}

    def of(self, connection: Connection, batch_id: str, queued: QueuedStage, node: str) -> Stage:
        """Return the stage that a rollout is placed in. One that was tried before goes the long way."""
        if queued.stage is not Stage.INIT or queued.attempt > 1:
            return queued.stage
        if queued.data_source not in self._without.get(node, ()):
            return Stage.INIT
        if batch_id not in self._agents:
            self._agents[batch_id] = batches.request_of(connection, batch_id).get("agent") or ""
        return Stage.INIT if self._agents[batch_id] else Stage.RUN

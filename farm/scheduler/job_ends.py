"""The end times of the jobs that nodes run in: a node gets no rollout that may take longer than its job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from sqlalchemy import Connection

from farm.records.node import Node
from farm.records.request import Limits
from farm.records.rollout import Stage
from farm.store import batches


class JobEnds:
    """Knows the nodes whose jobs have a time limit, and the limits of the waiting batches."""

    def __init__(self) -> None:
        self._limited: dict[str, Node] = {}
        self._limits: dict[str, Limits] = {}

    def note(self, up: Sequence[Node]) -> None:
        """Update the nodes that are up."""
        self._limited = {node.node: node for node in up if node.ends}

    def forget(self, but: Collection[str]) -> None:
        """Forget batches that no longer wait."""
        self._limits = {batch_id: limits for batch_id, limits in self._limits.items() if batch_id in but}

    def lasts(self, connection: Connection, batch_id: str, room: Mapping[str, int]) -> bool:
        """Return whether all nodes with free slots last long enough for any rollout of a batch."""
        fits = self.fits(connection, batch_id, Stage.INIT)
        return all(fits(node) for node in self._limited if room.get(node))

    def fits(self, connection: Connection, batch_id: str, stage: Stage | None) -> Callable[[str], bool]:
        """Return a predicate on node names: the node's job lasts for a stage and the stages after it."""
        limited = self._limited
        if not limited or stage is None:
            return lambda node: True
        if batch_id not in self._limits:
            self._limits[batch_id] = Limits.model_validate(batches.request_of(connection, batch_id).get("limits", {}))
        limits = self._limits[batch_id]
        longest_s = limits.eval_s + (0.0 if stage is Stage.EVAL else limits.init_s + limits.run_s)
        return lambda node: node not in limited or limited[node].lasts_for(longest_s)

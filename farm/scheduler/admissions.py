"""The choice of what is placed next, and where: rollouts and borrowed sandboxes, in turn.

A rollout begins with its run, if its kind needs no sandbox on its node, else with init. A node gets no rollout that may
take longer than the job that it runs in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from farm.records.node import Node
from farm.records.request import Limits
from farm.records.rollout import Stage
from farm.store import batches, borrowed_sandboxes, placement
from farm.store.placement import QueuedStage, WaitingBatch

_LENT = "sandboxes "
"""The prefix, before a priority, of the name under which waiting sandboxes take turns. Batch ids have no space."""


def fair_shares(waits: Sequence[WaitingBatch], room: int) -> dict[str, int]:
    """Return how many rollouts of each batch to admit: higher priority first, then evenly, counting those under way.

    A lower priority gets nothing while a higher one waits. Of equals, the first ones get more.
    """
    shares: dict[str, int] = {}
    for priority in sorted({wait.priority for wait in waits}, reverse=True):
        level = [wait for wait in waits if wait.priority == priority]
        for batch_id, share in _level(level, room).items():
            shares[batch_id] = share
            room -= share
    return shares


def _level(waits: Sequence[WaitingBatch], room: int) -> dict[str, int]:
    """Fill up batches of one priority so that those with the fewest under way catch up first."""
    shares = dict.fromkeys((wait.batch_id for wait in waits), 0)
    lowest = [(wait.n_placed, index, wait) for index, wait in enumerate(waits) if wait.n_waiting]
    heapq.heapify(lowest)
    while room > 0 and lowest:
        level, index, wait = heapq.heappop(lowest)
        up_to = lowest[0][0] - level if lowest else room
        step = min(room, max(1, up_to), wait.n_waiting - shares[wait.batch_id])
        shares[wait.batch_id] += step
        room -= step
        if shares[wait.batch_id] < wait.n_waiting:
            heapq.heappush(lowest, (level + step, index, wait))
    return {batch_id: share for batch_id, share in shares.items() if share}


class FreeSlots:
    """The free slots of nodes, taken one by one: from the emptiest node first, from `recently_failed` nodes last."""

    def __init__(self, room: Mapping[str, int], recently_failed: Collection[str] = ()) -> None:
        self._left = [(node in recently_failed, -n, node) for node, n in room.items() if n > 0]
        heapq.heapify(self._left)

    def take(self, fits: Callable[[str], bool] = lambda node: True) -> str | None:
        """Return the node of the next free slot among those that fit; None if there is none."""
        passed_over = []
        taken = None
        while self._left and taken is None:
            failed, n, node = entry = heapq.heappop(self._left)
            if not fits(node):
                passed_over.append(entry)
                continue
            taken = node
            if n < -1:
                passed_over.append((failed, n + 1, node))
        for entry in passed_over:
            heapq.heappush(self._left, entry)
        return taken


@dataclass(frozen=True, slots=True)
class Admission:
    """A user of one slot of a node: a rollout's stage, (id, attempt, stage), or a borrowed sandbox."""

    node: str = ""
    stage_of_attempt: tuple[str, int, Stage] | None = None
    sandbox_id: str = ""


class Admissions:
    """Remembers whose turn it was. `choose` works for one round, with the nodes that are up and their free slots."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._job_ends = JobEnds()
        self._first_stages = FirstStages()

    def choose(
        self, connection: Connection, up: Sequence[Node], room: Mapping[str, int], recently_failed: Collection[str]
    ) -> tuple[list[Admission], float]:
        """Return the admissions, each with its node, and how much waits, which is not counted without free slots."""
        n_free = sum(room.values())
        if not n_free:
            # a full farm: the waiting rollouts are not read, however many there are
            return [], math.inf
        # one more than there are free slots, to know whether any is left
        waits = [*placement.waiting(connection, n_free + 1), *_waiting_sandboxes(connection, n_free + 1)]
        if not waits:
            return [], 0
        self._job_ends.note(up)
        self._first_stages.note(up)
        fits_all = {
            wait.batch_id: wait.batch_id.startswith(_LENT) or self._job_ends.lasts(connection, wait.batch_id, room)
            for wait in waits
        }
        fitting = [wait if fits_all[wait.batch_id] else self._fitting(connection, wait, room) for wait in waits]
        # rollouts that fit only on some nodes go first: the rest fits on any
        shares = sorted(self._shares(fitting, n_free).items(), key=lambda share: fits_all[share[0]])
        slots = FreeSlots(room, recently_failed)
        return list(self._placed(connection, shares, slots)), sum(wait.n_waiting for wait in waits)

    def _fitting(self, connection: Connection, wait: WaitingBatch, room: Mapping[str, int]) -> WaitingBatch:
        """Limit a batch to what fits on nodes whose jobs last long enough, so that other batches keep their turns."""
        name = wait.batch_id
        for queued in placement.next_of(connection, name, 1):
            fits = self._job_ends.fits(connection, name, queued.stage)
            return replace(wait, n_waiting=min(wait.n_waiting, sum(n for node, n in room.items() if fits(node))))
        return wait

    def _shares(self, waits: Sequence[WaitingBatch], room: int) -> dict[str, int]:
        """Return the share of each waiting batch. If not all fit, the least recently served of equals go first.

        All borrowed sandboxes (`_LENT`) of one priority count as one batch.
        """
        in_turn = sorted(waits, key=lambda wait: self._served.get(wait.batch_id, 0))
        shares = fair_shares(in_turn, room)
        served = {wait.batch_id: self._served.get(wait.batch_id, 0) for wait in waits}
        self._job_ends.forget(served)
        self._first_stages.forget(served)
        self._served = served | dict.fromkeys(shares, max(served.values(), default=0) + 1)
        return shares

    def _placed(
        self, connection: Connection, shares: Sequence[tuple[str, int]], slots: FreeSlots
    ) -> Iterator[Admission]:
        for name, share in shares:
            if name.startswith(_LENT):
                for sandbox_id in borrowed_sandboxes.next_of(connection, int(name.removeprefix(_LENT)), share):
                    if node := slots.take():
                        yield Admission(node, sandbox_id=sandbox_id)
                continue
            nowhere: set[Stage] = set()
            for queued in placement.next_of(connection, name, share):
                if queued.stage in nowhere:
                    continue
                if node := slots.take(self._job_ends.fits(connection, name, queued.stage)):
                    first = self._first_stages.of(connection, name, queued, node)
                    yield Admission(node, (queued.rollout_id, queued.attempt, first))
                else:
                    nowhere.add(queued.stage)


def _waiting_sandboxes(connection: Connection, limit: int) -> list[WaitingBatch]:
    """Return the waiting borrowed sandboxes, those of each priority as one batch."""
    return [
        WaitingBatch(f"{_LENT}{wait.priority}", wait.priority, wait.n_waiting, wait.n_placed)
        for wait in borrowed_sandboxes.waiting(connection, limit)
    ]


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

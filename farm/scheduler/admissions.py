"""The choice of what is placed next, and where: rollouts and borrowed sandboxes, in turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from farm.records.node import Node
from farm.records.rollout import Stage
from farm.scheduler.fair_share import FreeSlots, fair_shares
from farm.scheduler.first_stages import FirstStages
from farm.scheduler.job_ends import JobEnds
from farm.store import borrowed_sandboxes, placement
from farm.store.placement import WaitingBatch

_LENT = "sandboxes "
"""The prefix, before a priority, of the name under which waiting sandboxes take turns. Batch ids have no space."""


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
        result = fair_shares(in_turn, room)
        served = {wait.batch_id: self._served.get(wait.batch_id, 0) for wait in waits}
        self._job_ends.forget(served)
        self._first_stages.forget(served)
        self._served = served | dict.fromkeys(result, max(served.values(), default=0) + 1)
        return result

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

"""Shares of the batches in the free slots, and the nodes that take them: pure functions of demand and capacity."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

from farm.store.placement import WaitingBatch


def fair_shares(waits: Sequence[WaitingBatch], room: int) -> dict[str, int]:
    """Return how many rollouts of each batch to admit: higher priority first, then evenly, counting those under way.

    A lower priority gets nothing while a higher one waits. Of equals, the first ones get more.
    """
    result: dict[str, int] = {}
    for priority in sorted({wait.priority for wait in waits}, reverse=True):
        level = [wait for wait in waits if wait.priority == priority]
        for batch_id, share in _level(level, room).items():
            result[batch_id] = share
            room -= share
    return result


def _level(waits: Sequence[WaitingBatch], room: int) -> dict[str, int]:
    """Fill up batches of one priority so that those with the fewest under way catch up first."""
    result = dict.fromkeys((wait.batch_id for wait in waits), 0)
    lowest = [(wait.n_placed, place, wait) for place, wait in enumerate(waits) if wait.n_waiting]
    heapq.heapify(lowest)
    while room > 0 and lowest:
        level, place, wait = heapq.heappop(lowest)
        up_to = lowest[0][0] - level if lowest else room
        step = min(room, max(1, up_to), wait.n_waiting - result[wait.batch_id])
        result[wait.batch_id] += step
        room -= step
        if result[wait.batch_id] < wait.n_waiting:
            heapq.heappush(lowest, (level + step, place, wait))
    return {batch_id: share for batch_id, share in result.items() if share}


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

"""What sandboxes the queue will ask of this node: first those of the rollouts it was given, then those of the next.

The next are told as the dispatcher would choose them. Other nodes may get them; then what was made ready is for later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from farm.dispatcher import shares
from farm.errors import FarmError
from farm.store import placement
from farm.store.placement import Coming
from workers.sandboxes import layers
from workers.sandboxes.prepared import Recipe
from workers.stages import Place, place_of
from workers.worker import Worker

log = logging.getLogger(__name__)

_WAITING_EVERY_S = 2.0
"""Looking at all that waits for any node costs the database more than looking at what this one was given."""
PAUSE_S = 30.0
"""What could not be made ready is not tried again for so long."""
_REMEMBER = 256


@dataclass(frozen=True, slots=True)
class Want:
    """`n` sandboxes that are made alike."""

    recipe: Recipe
    n: int


class Demand:
    """Of the node of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: list[Coming] = []
        self._waiting_due = 0.0
        self._place = lru_cache(_REMEMBER)(self._find_place)
        self._paused: dict[tuple[str, int], float] = {}

    def wants(self, limit: int) -> list[Want]:
        """About `limit` sandboxes, the first to be asked for first. Blocks; long if an image is to be built."""
        return [want for coming in self._coming(limit) if (want := self._want(coming)) is not None]

    def _coming(self, limit: int) -> Iterator[Coming]:
        store = self._worker.store
        given = store.read(partial(placement.rung, node=self._worker.node))
        for coming in given:
            if limit <= 0:
                return
            limit -= coming.n
            yield coming
        if limit > 0 and time.monotonic() >= self._waiting_due:
            waits = shares(store.read(partial(placement.waiting, limit=limit)), limit)
            found = [
                store.read(partial(placement.next_groups_of, batch_id=batch_id, limit=share))
                for batch_id, share in waits.items()
            ]
            self._waiting = [coming for group in found for coming in group]
            self._waiting_due = time.monotonic() + _WAITING_EVERY_S
        for coming in self._waiting:
            if limit <= 0:
                return
            limit -= coming.n
            yield coming

    def _want(self, coming: Coming) -> Want | None:
        """None if nothing can be made ready, or nothing is known: then the rollout itself will say why."""
        key = (coming.batch_id, coming.group_index)
        if self._paused.get(key, 0.0) > time.monotonic():
            return None
        try:
            return _want(self._place(*key), coming.n)
        except FarmError as error:
            log.info("no sandbox is made ready for %s.%d: %s", *key, error)
        except Exception:
            log.exception("handler of %s.%d broke", *key)
        self._paused[key] = time.monotonic() + PAUSE_S
        return None

    def _find_place(self, batch_id: str, group_index: int) -> Place | None:
        return place_of(self._worker.job_of(batch_id, group_index, f"{batch_id}.{group_index}.0", 0, 0))


def _want(place: Place | None, n: int) -> Want | None:
    if place is None:
        return None
    if not place.shared:
        return Want(place.provider.recipe(place.spec), n)
    layer = place.provider.layer(place.spec, place.shared)
    if layers.exists(layer):
        return Want(place.provider.recipe(place.spec, layer), n)
    # the one that is prepared, and then becomes the layer
    return Want(place.provider.recipe(place.spec), 1)

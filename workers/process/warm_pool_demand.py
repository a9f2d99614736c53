"""The sandboxes that the queue will need on this node: first for rollouts placed on it, then for the next ones.

The next ones are those that the dispatcher would choose. If other nodes get them, the prepared sandboxes serve later
rollouts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from farm.errors import FarmError
from farm.ids import group_id, rollout_id
from farm.records.request import SandboxSpec
from farm.scheduler.admissions import fair_shares
from farm.store import nodes, placement
from farm.store.database import Store
from farm.store.placement import UpcomingStart
from workers.process.worker import Worker
from workers.sandboxes.launch_plan import LaunchPlan
from workers.sandboxes.lifecycle import layers
from workers.sandboxes.optional_protocols import StartsAhead, shares_layers, starts_ahead
from workers.stages.stage_job import resolve, resolve_problem

log = logging.getLogger(__name__)

_WAITING_EVERY_S = 2.0
_WAITING_OF_NODE_S = 0.25
"""Interval per node between reads of the waiting rollouts: the cost grows with the number of nodes that read them."""
_WAITING_COUNTS_S = 10.0
"""Seconds after which the list of waiting rollouts is outdated."""
_IDLE_S = 2.0
"""Seconds between reads while no rollout is placed on this node and none waits."""
PAUSE_S = 30.0
"""Seconds for which a sandbox that could not be prepared is not tried again."""
_CACHE_SIZE = 256


@dataclass(frozen=True, slots=True)
class WarmPoolDemand:
    """`n` sandboxes with the same plan."""

    recipe: LaunchPlan
    n: int


@dataclass(frozen=True, slots=True)
class WarmSource:
    """The provider and spec of sandboxes; `shared` names the files prepared once for several, empty if none are."""

    provider: StartsAhead
    spec: SandboxSpec
    shared: str


class UpcomingStarts:
    """The starts on a node and its possible next ones, read seldom, so that an idle node causes little load."""

    def __init__(
        self, store: Store, node: str, node_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._node = node
        self._node_timeout_s = node_timeout_s
        self._clock = clock
        self._waiting: list[UpcomingStart] = []
        self._look_due = self._waiting_due = self._waited_at = 0.0

    def first(self, limit: int) -> Iterator[UpcomingStart]:
        """Yield about `limit` starts, first those placed on this node."""
        now = self._clock()
        if now < self._look_due:
            return
        placed = self._store.read(partial(placement.assigned_starts, node=self._node))
        for coming in placed:
            if limit <= 0:
                return
            limit -= coming.n
            yield coming
        if limit > 0 and now >= self._waiting_due:
            self._waiting = self._next(limit)
            # the read is cheap if nothing waits
            healthy = partial(nodes.n_healthy, node_timeout_s=self._node_timeout_s)
            n_nodes = self._store.read(healthy) if self._waiting else 0
            self._waited_at, self._waiting_due = now, now + max(_WAITING_EVERY_S, n_nodes * _WAITING_OF_NODE_S)
        if now > self._waited_at + _WAITING_COUNTS_S:
            self._waiting = []
        if not placed and not self._waiting:
            self._look_due = now + _IDLE_S
        for coming in self._waiting:
            if limit <= 0:
                return
            limit -= coming.n
            yield coming

    def _next(self, limit: int) -> list[UpcomingStart]:
        """Return the starts that the dispatcher would choose next, among all that wait for any node."""
        waits = fair_shares(self._store.read(partial(placement.waiting, limit=limit)), limit)
        result = [
            self._store.read(partial(placement.next_groups_of, batch_id=batch_id, limit=share))
            for batch_id, share in waits.items()
        ]
        return [coming for group in result for coming in group]


class NodeDemand:
    """The demand on a worker's node."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._starts = UpcomingStarts(worker.store, worker.node, worker.options.node_timeout_s)
        self._source = lru_cache(_CACHE_SIZE)(self._find_source)
        self._paused: dict[tuple[str, int], float] = {}

    def upcoming(self, limit: int) -> list[WarmPoolDemand]:
        """Return about `limit` sandboxes, the first needed first. Blocks, for long if an image must be built."""
        return [want for coming in self._starts.first(limit) if (want := self._demand_of(coming)) is not None]

    def _demand_of(self, coming: UpcomingStart) -> WarmPoolDemand | None:
        """Return None if nothing can be prepared or the instance is invalid; the rollout itself reports the error."""
        key = (coming.batch_id, coming.group_index)
        if self._paused.get(key, 0.0) > time.monotonic():
            return None
        try:
            source = self._source(*key)
            return None if source is None else _demand(source, coming.n)
        except FarmError as error:
            log.info("No sandbox started in advance for %s: %s", group_id(*key), error)
        except Exception:
            log.exception("Handler of %s failed", group_id(*key))
        self._paused[key] = time.monotonic() + PAUSE_S
        return None

    def _find_source(self, batch_id: str, group_index: int) -> WarmSource | None:
        """Return the source of an instance's sandboxes; None if they cannot be started in advance."""
        job = self._worker.job_of(batch_id, group_index, rollout_id(batch_id, group_index, 0), 0, 0)
        self._worker.fetch_archive(job)
        resolved = resolve(resolve_problem(job))
        if resolved.source is None or (provider := starts_ahead(resolved.source.provider)) is None:
            return None
        shared = resolved.problem.shared() if shares_layers(resolved.source.provider) is not None else ""
        return WarmSource(provider, resolved.source.spec, shared)


def _demand(source: WarmSource, n: int) -> WarmPoolDemand:
    if not source.shared:
        return WarmPoolDemand(source.provider.recipe(source.spec), n)
    layer = source.provider.layer(source.spec, source.shared)
    if layers.exists(layer):
        return WarmPoolDemand(source.provider.recipe(source.spec, layer), n)
    # the sandbox that is prepared and then becomes the layer
    return WarmPoolDemand(source.provider.recipe(source.spec), 1)

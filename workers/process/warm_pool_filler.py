"""Fills the warm pool for queued rollouts: a thread of the init worker, which has the handlers.

It starts a few sandboxes at a time, and none while as many are started for waiting rollouts, so it uses only idle
capacity. If nothing is queued, it keeps some of the recently used kinds: for a single rollout, and for the sandbox of
its evaluation.

Its demand is what the queue will need on this node: first for rollouts placed on it, then for the next ones that the
dispatcher would choose. If other nodes get them, the prepared sandboxes serve later rollouts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from farm.errors import FarmError, NotFound, StoreUnavailable
from farm.ids import group_id, rollout_id
from farm.records.request import SandboxSpec
from farm.scheduler.admissions import fair_shares
from farm.settings import Settings, settings
from farm.store import nodes, placement
from farm.store.database import Store
from farm.store.placement import UpcomingStart
from workers.config import SandboxConfig
from workers.plugins import registry
from workers.process.worker import Worker, worker
from workers.sandboxes.launch_plan import STARTS, LaunchPlan, SandboxParts, prepare
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.optional_protocols import StartsAhead, shares_layers, starts_ahead
from workers.stages.stage_job import resolve, resolve_problem

log = logging.getLogger(__name__)

PERIOD_S = 0.5
_N_RECENT = 4
"""Number of recently used keys that are kept ready,"""
_N_SPARE = 2
"""and number of sandboxes of each."""

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


DemandSource = Callable[[int], Sequence[WarmPoolDemand]]


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
        for start in placed:
            if limit <= 0:
                return
            limit -= start.n
            yield start
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
        for start in self._waiting:
            if limit <= 0:
                return
            limit -= start.n
            yield start

    def _next(self, limit: int) -> list[UpcomingStart]:
        """Return the starts that the dispatcher would choose next, among all that wait for any node."""
        waits = fair_shares(self._store.read(partial(placement.waiting, limit=limit)), limit)
        groups = [
            self._store.read(partial(placement.next_groups_of, batch_id=batch_id, limit=share))
            for batch_id, share in waits.items()
        ]
        return [start for group in groups for start in group]


class NodeDemand:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._starts = UpcomingStarts(worker.store, worker.node, worker.options.node_timeout_s)
        self._source = lru_cache(_CACHE_SIZE)(self._find_source)
        self._paused: dict[tuple[str, int], float] = {}

    def upcoming(self, limit: int) -> list[WarmPoolDemand]:
        """Return about `limit` sandboxes, the first needed first. Blocks, for long if an image must be built."""
        return [demand for start in self._starts.first(limit) if (demand := self._demand_of(start)) is not None]

    def _demand_of(self, start: UpcomingStart) -> WarmPoolDemand | None:
        """Return None if nothing can be prepared or the instance is invalid; the rollout itself reports the error."""
        key = (start.batch_id, start.group_index)
        if self._paused.get(key, 0.0) > time.monotonic():
            return None
        try:
            source = self._source(*key)
            return None if source is None else _demand(source, start.n)
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
    recipe = source.provider.recipe(source.spec, layer)
    if layers.exists(recipe.config, layer):
        return WarmPoolDemand(recipe, n)
    # the sandbox that is prepared and then becomes the layer
    return WarmPoolDemand(source.provider.recipe(source.spec), 1)


@dataclass(frozen=True, slots=True)
class FillTarget:
    """The number of sandboxes with the same plan to keep."""

    recipe: LaunchPlan
    parts: SandboxParts
    n: int


class WarmPoolFiller:
    """Fills the warm pool until stopped. `demand_source(limit)` returns the sandboxes to start, most urgent first."""

    def __init__(self, demand_source: DemandSource, options: Settings) -> None:
        self._demand_source = demand_source
        self._options = options
        self._config = SandboxConfig.of(options)
        self._n_starts = options.warm_pool_starts or max(1, len(os.sched_getaffinity(0)) // 2)
        self._goals: dict[str, FillTarget] = {}
        self._goals_due = 0.0
        self._starting: Counter[str] = Counter()
        self._paused: dict[str, float] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False

    def start(self) -> None:
        """Start the thread, which ends with the process; the lifeline ends sandboxes that it was starting."""
        threading.Thread(target=self._run, name="warm-pool", daemon=True).start()

    def stop(self) -> None:
        """Start no more sandboxes."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        pause_s = PERIOD_S
        while not self._stopped:
            self._wake.wait(pause_s)
            self._wake.clear()
            try:
                self.round()
                pause_s = PERIOD_S
            except StoreUnavailable as error:
                log.warning("Warm pool not filled; retrying: %s", error)
                pause_s = PAUSE_S
            except Exception:
                log.exception("Warm pool not filled; retrying")
                pause_s = PAUSE_S

    def round(self) -> None:
        """Compare the demand with the pool, and start or drop sandboxes accordingly."""
        if time.monotonic() >= self._goals_due:
            self._goals = self._find_goals()
            self._goals_due = time.monotonic() + PERIOD_S
        # in this order a sandbox that comes up meanwhile counts twice; in the other order, not at all
        with self._lock:
            starting = Counter(self._starting)
        ready = warm_pool.ready(self._config)
        missing = Counter[str]()
        for key, goal in self._goals.items():
            folders = ready.get(key, [])
            missing[key] = max(0, goal.n - len(folders) - starting[key])
            for path in folders[: goal.n]:
                warm_pool.touch(path)
        n_all = sum(map(len, ready.values())) + starting.total() + missing.total()
        self._drop(n_all - self._options.warm_pool_total, ready)
        for key in missing.elements():
            if not self._begin(key, self._goals[key]):
                return

    def _find_goals(self) -> dict[str, FillTarget]:
        """Return the targets by key, the most urgent first."""
        goals: dict[str, FillTarget] = {}
        known: dict[str, SandboxParts | None] = {}
        room = self._options.warm_pool_total
        for demand in (*self._demand_source(self._options.warm_pool_total), *self._recent()):
            name = demand.recipe.spec.model_dump_json(exclude={"env"})
            if name not in known:
                known[name] = self._parts(name, demand.recipe)
            if (parts := known[name]) is None:
                continue
            key = demand.recipe.key(parts)
            before = goals[key].n if key in goals else 0
            more = max(0, min(demand.n, room, self._options.warm_pool - before))
            room -= more
            if more:
                goals[key] = FillTarget(demand.recipe, parts, before + more)
        return goals

    def _recent(self) -> Iterator[WarmPoolDemand]:
        for use in warm_pool.uses(self._config, self._config.warm_pool_idle_s)[:_N_RECENT]:
            # ignore kinds that are not installed any more
            with contextlib.suppress(NotFound):
                if (provider := starts_ahead(registry.sandbox(use.kind))) is not None:
                    yield WarmPoolDemand(provider.recipe(use.spec), _N_SPARE)

    def _parts(self, name: str, recipe: LaunchPlan) -> SandboxParts | None:
        """Return all parts of a sandbox; None if that fails, which the rollout's own start will report."""
        if self._is_paused(name):
            return None
        try:
            return prepare(recipe.config, recipe.spec)
        except FarmError as error:
            log.info("No sandbox started in advance of image %s: %s", recipe.spec.image, error)
            self._pause(name)
            return None

    def _drop(self, n: int, ready: Mapping[str, Sequence[Path]]) -> None:
        """Make room by dropping up to `n` sandboxes that are not needed now."""
        if n <= 0:
            return
        unwanted = [
            path for key, paths in ready.items() for path in paths[self._goals[key].n if key in self._goals else 0 :]
        ]
        for path in unwanted[:n]:
            warm_pool.discard(path)

    def _begin(self, key: str, goal: FillTarget) -> bool:
        """Start one more, unless enough are starting or it has just failed. Returns whether to continue."""
        with self._lock:
            if self._stopped or self._starting.total() + STARTS.n >= self._n_starts:
                return False
            if not self._is_paused(key):
                self._starting[key] += 1
                threading.Thread(target=self._make, args=(key, goal), name="warm-start", daemon=True).start()
        return True

    def _make(self, key: str, goal: FillTarget) -> None:
        try:
            goal.recipe.fill_warm_pool(goal.parts)
        except Exception as error:
            log.warning("Sandbox not started in advance: %s", error)
            self._pause(key)
        with self._lock:
            self._starting[key] -= 1
        self._wake.set()

    def _is_paused(self, name: str) -> bool:
        return self._paused.get(name, 0.0) > time.monotonic()

    def _pause(self, name: str) -> None:
        self._paused[name] = time.monotonic() + PAUSE_S


@lru_cache(maxsize=1)
def warm_pool_filler() -> WarmPoolFiller:
    """Return the filler of this process, which is the node's init worker."""
    return WarmPoolFiller(NodeDemand(worker()).upcoming, settings())

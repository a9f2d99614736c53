"""Fills the warm pool for queued rollouts: a thread of the init worker, which has the handlers.

It starts a few sandboxes at a time, and none while as many are started for waiting rollouts, so it uses only idle
capacity. If nothing is queued, it keeps some of the recently used kinds: for a single rollout, and for the sandbox of
its evaluation.
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
from functools import lru_cache
from pathlib import Path

from farm.errors import FarmError, NotFound, StoreUnavailable
from farm.settings import Settings, settings
from workers.plugins import registry
from workers.process.warm_pool_demand import PAUSE_S, NodeDemand, WarmPoolDemand
from workers.process.worker import worker
from workers.sandboxes.launch_plan import STARTS, LaunchPlan, SandboxParts, prepare
from workers.sandboxes.lifecycle import warm_pool
from workers.sandboxes.optional_protocols import starts_ahead

log = logging.getLogger(__name__)

PERIOD_S = 0.5
_N_RECENT = 4
"""Number of recently used keys that are kept ready,"""
_N_SPARE = 2
"""and number of sandboxes of each."""

DemandSource = Callable[[int], Sequence[WarmPoolDemand]]


@dataclass(frozen=True, slots=True)
class FillTarget:
    """The number of sandboxes with the same plan to keep."""

    recipe: LaunchPlan
    parts: SandboxParts
    n: int


class WarmPoolFiller:
    """Fills the warm pool until stopped. `upcoming(limit)` returns the sandboxes to start, the most urgent first."""

    def __init__(self, wants: DemandSource, options: Settings) -> None:
        self._wants = wants
        self._options = options
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
        ready = warm_pool.ready()
        missing = Counter[str]()
        for key, goal in self._goals.items():
            there = ready.get(key, [])
            missing[key] = max(0, goal.n - len(there) - starting[key])
            for path in there[: goal.n]:
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
        for want in (*self._wants(self._options.warm_pool_total), *self._recent()):
            name = want.recipe.spec.model_dump_json(exclude={"env"})
            if name not in known:
                known[name] = self._parts(name, want.recipe)
            if (parts := known[name]) is None:
                continue
            key = want.recipe.key(parts)
            before = goals[key].n if key in goals else 0
            more = max(0, min(want.n, room, self._options.warm_pool - before))
            room -= more
            if more:
                goals[key] = FillTarget(want.recipe, parts, before + more)
        return goals

    def _recent(self) -> Iterator[WarmPoolDemand]:
        for use in warm_pool.uses(self._options.warm_pool_idle_s)[:_N_RECENT]:
            # ignore kinds that are not installed any more
            with contextlib.suppress(NotFound):
                if (provider := starts_ahead(registry.sandbox(use.kind))) is not None:
                    yield WarmPoolDemand(provider.recipe(use.spec), _N_SPARE)

    def _parts(self, name: str, recipe: LaunchPlan) -> SandboxParts | None:
        """Return all parts of a sandbox; None if that fails, which the rollout's own start will report."""
        if self._is_paused(name):
            return None
        try:
            return prepare(recipe.spec)
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

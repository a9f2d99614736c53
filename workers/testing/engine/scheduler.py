"""The double's scheduler: slots and a queue, simulated speed, pauses, aborts, and the weights' version.

Three delays are simulated, as on a real engine: a latency, and times for the prompt's new tokens and the sampled ones.
All default to zero; then a run ends at once, without any step.

The prefix cache has whole blocks, keyed by a hash of all ids up to their end, in two halves. When the newer one is full
it becomes the older one, and the former older one's blocks are evicted unless used since. So a block is never cached
without all blocks before it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import TokenIds, VersionSpan
from workers.testing.engine.simulated_values import mixed

BLOCK_TOKENS = 16
CACHE_TOKENS = 2**24
_STEP_S = 0.01
_MAX_LATE_S = 0.1
UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """All that will be sampled unless it is cut, and the end then."""

    ids: TokenIds
    finish_reason: str
    stop_reason: str | int | None = None
    text_end: int | None = None
    """Position at which a stop string cuts the text; the ids are not cut."""


@dataclass(slots=True, eq=False)
class EngineRun:
    """`n_sampled` ids of the plan are sampled so far; `spans` cover them. `extra_s` is a delay of this run only."""

    run_id: str
    prompt: TokenIds
    plan: SamplingPlan
    salt: str = ""
    extra_s: float = 0.0
    n_sampled: int = 0
    n_cached: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False
    late: bool = False
    """It arrived during a pause."""
    nudge: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.aborted or self.n_sampled >= len(self.plan.ids)

    @property
    def ids(self) -> TokenIds:
        return self.plan.ids[: self.n_sampled]

    @property
    def finish_reason(self) -> str:
        """The finish reason; only of an ended run."""
        return "abort" if self.n_sampled < len(self.plan.ids) else self.plan.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return None if self.n_sampled < len(self.plan.ids) else self.plan.stop_reason

    def sample(self, n: int, version: str) -> None:
        """Take the next n ids under these weights."""
        end = min(self.n_sampled + n, len(self.plan.ids))
        if end > self.n_sampled:
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = VersionSpan(version, self.spans[-1].start, end)
            else:
                self.spans.append(VersionSpan(version, self.n_sampled, end))
        self.n_sampled = end

    def abort(self) -> None:
        self.aborted = True
        self.nudge.set()


class PrefixCache:
    """`n_queries` and `n_hits` count tokens, as vLLM's metrics do."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, size_tokens: int = CACHE_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._n_half = max(size_tokens // block_tokens // 2, 1)
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._multipliers = mixed(np.arange(1, block_tokens + 1, dtype=np.uint64)) | np.uint64(1)
        self.n_queries = 0
        self.n_hits = 0

    def look(self, prompt: TokenIds, salt: str = "") -> int:
        """Return how many of a prompt's first tokens are cached, always fewer than all. Counts as a query."""
        hashes = self._hashes(prompt[: max(len(prompt) - 1, 0)], salt)
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._newer or hashes[middle - 1] in self._older:
                low = middle
            else:
                high = middle - 1
        self.n_queries += len(prompt)
        self.n_hits += low * self._block_tokens
        return low * self._block_tokens

    def keep(self, ids: TokenIds, salt: str = "") -> None:
        """Cache the whole blocks of computed ids."""
        if len(self._newer) >= self._n_half:
            self._older, self._newer = self._newer, set()
        self._newer.update(self._hashes(ids, salt))

    def clear(self) -> None:
        self._newer.clear()
        self._older.clear()

    @property
    def usage(self) -> float:
        """The used share of its capacity."""
        return min((len(self._newer) + len(self._older)) / (2 * self._n_half), 1.0)

    def _hashes(self, ids: TokenIds, salt: str) -> list[int]:
        """Return a hash for each whole block, of all ids up to its end: the sum of the blocks' own hashes, each mixed
        with its position."""
        n = len(ids) // self._block_tokens
        blocks = ids[: n * self._block_tokens].astype(np.uint64).reshape(n, self._block_tokens)
        own: NDArray[np.uint64] = mixed((blocks + np.uint64(1)) * self._multipliers).sum(axis=1, dtype=np.uint64)
        positions = np.arange(n, dtype=np.uint64)
        sums = np.cumsum(mixed(own + positions), dtype=np.uint64)
        hashes: list[int] = (sums ^ np.uint64(zlib.crc32(salt.encode()))).tolist()
        return hashes


@dataclass(frozen=True, slots=True)
class SimulatedSpeed:
    """`tokens_per_s` is the speed of one run, `prefill_per_s` counts uncached prompt tokens; 0 means no limit.

    `max_running` runs sample at once, the others queue; beyond `max_queued` they are refused.
    """

    latency_s: float = 0.0
    prefill_per_s: float = 0.0
    tokens_per_s: float = 0.0
    max_running: int = UNLIMITED
    max_queued: int = UNLIMITED

    @property
    def step(self) -> int:
        """Number of tokens between two checks of the clock; 0 for all."""
        return max(1, round(self.tokens_per_s * _STEP_S)) if self.tokens_per_s else 0

    @property
    def step_s(self) -> float:
        return self.step / self.tokens_per_s if self.tokens_per_s else 0.0


class Scheduler:
    """Counts: `n_started`, `n_cancelled` (client disconnected), `n_tokens` sampled, `finished` by reason."""

    def __init__(self, speed: SimulatedSpeed, cache: PrefixCache, version: str = "default") -> None:
        self.speed = speed
        self.cache = cache
        self.version = version
        self.paused = ""
        self.running: dict[int, EngineRun] = {}
        self.waiting: dict[int, EngineRun] = {}
        self.n_started = 0
        self.n_cancelled = 0
        self.n_rejected = 0
        self.n_tokens = 0
        self.n_prompt_tokens = 0
        self.finished: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def full(self) -> bool:
        """True if the queue accepts no more."""
        no_slot = len(self.running) >= self.speed.max_running
        return no_slot and len(self.waiting) >= self.speed.max_queued

    @property
    def is_frozen(self) -> bool:
        return self.paused == "keep"

    async def sample(self, run: EngineRun) -> AsyncIterator[int]:
        """Sample a run to its end; yields its number of ids whenever it grows. Closing the iterator cancels the run."""
        with self._counted(run):
            await self._admitted(run)
            if run.aborted:
                return
            with self._slot(run):
                new_s = (len(run.prompt) - run.n_cached) / (self.speed.prefill_per_s or inf)
                late_s = await self._pass(run, run.extra_s + self.speed.latency_s + new_s)
                if not run.aborted:
                    self.cache.keep(run.prompt, run.salt)
                while not run.ended:
                    late_s = await self._pass(run, self.speed.step_s - late_s)
                    if self._step(run):
                        yield run.n_sampled

    def _step(self, run: EngineRun) -> int:
        before = run.n_sampled
        if not run.aborted:
            run.sample(self.speed.step or len(run.plan.ids), self.version)
        self.n_tokens += run.n_sampled - before
        return run.n_sampled - before

    async def _pass(self, run: EngineRun, seconds: float) -> float:
        """Wait for a time in which the run is not frozen, unless it is aborted; return the lateness."""
        while not run.aborted:
            if not self.is_frozen and seconds <= 0:
                return min(-seconds, _MAX_LATE_S)
            began = time.monotonic()
            frozen = self.is_frozen
            run.nudge.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if frozen or seconds == inf else seconds):
                    await run.nudge.wait()
            seconds -= 0.0 if frozen else time.monotonic() - began
        return 0.0

    async def _admitted(self, run: EngineRun) -> None:
        """Wait for a slot, in order, and for the end of a pause during which it arrived."""
        run.late = bool(self.paused)
        self.waiting[id(run)] = run
        try:
            while not run.aborted and not self._may_start(run):
                run.nudge.clear()
                await run.nudge.wait()
        finally:
            del self.waiting[id(run)]
            self._call_next()

    def _may_start(self, run: EngineRun) -> bool:
        if self.is_frozen or (self.paused and run.late):
            return False
        return len(self.running) < self.speed.max_running and next(iter(self.waiting.values())) is run

    def _call_next(self) -> None:
        for run in islice(self.waiting.values(), 1):
            run.nudge.set()
        self._changed.set()

    @contextmanager
    def _slot(self, run: EngineRun) -> Iterator[None]:
        self.running[id(run)] = run
        self.n_started += 1
        self.n_prompt_tokens += len(run.prompt)
        run.n_cached = self.cache.look(run.prompt, run.salt)
        self._call_next()
        try:
            yield
        finally:
            self._free(run)

    def _free(self, run: EngineRun) -> None:
        """Free the slot of a run, unless its abort already has."""
        if self.running.pop(id(run), None) is not None:
            # The last token sampled was never an input.
            self.cache.keep(np.concatenate([run.prompt, run.ids[:-1]]), run.salt)
            self._call_next()

    @contextmanager
    def _counted(self, run: EngineRun) -> Iterator[None]:
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.n_cancelled += 1
            raise
        else:
            self.finished[run.finish_reason] += 1

    async def pause(self, mode: str, *, clear_cache: bool = True) -> None:
        """`abort` cuts running and waiting runs, `wait` returns once they have ended, `keep` freezes them."""
        self.paused = mode
        if mode == "abort":
            self.abort(lambda run: True)
        self._nudge_all()
        while mode == self.paused == "wait" and (self.running or any(not run.late for run in self.waiting.values())):
            self._changed.clear()
            await self._changed.wait()
        if clear_cache:
            self.cache.clear()

    def resume(self) -> None:
        self.paused = ""
        self._changed.set()
        for run in self.waiting.values():
            run.late = False
        self._nudge_all()

    def abort(self, chosen: Callable[[EngineRun], bool]) -> int:
        """Cut runs, including waiting ones; they end with the ids that they have. Return the number of runs.

        Their slots are free at once, although their clients read the answers later.
        """
        runs = [run for run in chain(self.running.values(), self.waiting.values()) if chosen(run)]
        for run in runs:
            run.abort()
            self._free(run)
        return len(runs)

    def _nudge_all(self) -> None:
        for run in chain(self.running.values(), self.waiting.values()):
            run.nudge.set()

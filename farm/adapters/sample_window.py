"""Groups for trainers that call for one sample at a time: simultaneous calls for one problem make one group.

slime's generate function and OpenRLHF's agent executor are called once for each sample, all samples of a problem at the
same moment. Run one by one they would have no siblings, and so no group mean for a failed one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Sample = TypeVar("Sample")
Result = TypeVar("Result")
WINDOW_S = 0.05
_MOST_BROKEN = 16


@dataclass
class _Group(Generic[Sample, Result]):
    """The samples of a problem so far, and the results of all of them, in order."""

    results: asyncio.Future[Sequence[Result]]
    samples: list[Sample] = field(default_factory=list)


@dataclass
class SampleWindow(Generic[Sample, Result]):
    """Gathers calls with one key that come within `window_s`, or until there are `most`, into one group.

    `run_samples(samples)` runs a group in a thread and returns a result for each sample. For one event loop.
    """

    run_samples: Callable[[Sequence[Sample]], Sequence[Result]]
    window_s: float = WINDOW_S
    most: int | None = None
    _open: dict[str, _Group[Sample, Result]] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def result(self, key: str, sample: Sample) -> Result:
        """Return the result of a sample once its group has ended; all calls of the group raise its errors."""
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._close(key, group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        index = len(group.samples)
        group.samples.append(sample)
        if len(group.samples) == self.most:
            del self._open[key]
        # cancelling one call must not cancel its siblings
        return (await asyncio.shield(group.results))[index]

    async def _close(self, key: str, group: _Group[Sample, Result]) -> None:
        await asyncio.sleep(self.window_s)
        if self._open.get(key) is group:
            del self._open[key]
        try:
            group.results.set_result(await asyncio.to_thread(self.run_samples, group.samples))
        except Exception as error:
            group.results.set_exception(error)
            # read here, too: all of the calls may have been cancelled
            group.results.exception()


@dataclass
class RewardsSoFar:
    """The mean reward of a run so far: the neutral reward for a group that failed whole. Thread-safe.

    Before the first score it is 0.0 for all members of such a group, so none has an advantage; after _MOST_BROKEN such
    groups there is none, and the next one is an error.
    """

    _n: int = 0
    _sum: float = 0.0
    _n_broken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def fallback(self) -> float | None:
        """Return the mean, or None if too many groups failed before the first score."""
        with self._lock:
            if self._n:
                return self._sum / self._n
            return 0.0 if self._n_broken < _MOST_BROKEN else None

    def take(self, scored: Sequence[float]) -> None:
        """Add the rewards of a group's scored members."""
        with self._lock:
            self._n += len(scored)
            self._sum += sum(scored)
            self._n_broken += not scored

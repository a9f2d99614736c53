"""Training runs: the verbs of a farm beyond those for single batches, of which `farm.collecting` is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.request import Instance
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate


class Runs(ABC):
    """The store's memory of training runs; `farm.collecting` is made of it. Raises as the verbs of `Farm` do."""

    @abstractmethod
    def keyed_batches(self, keys: Sequence[str]) -> Sequence[KeyedBatch]:
        """Return the batches that were submitted with these idempotency keys, in their order; at most 1,000 keys."""

    @abstractmethod
    def instances(self, group_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the instances that these groups were asked for with, in their order, to be asked for again.

        Raises NotFound; InvalidRequest for one with an engine's key of its own, which is shown nowhere.
        """

    @abstractmethod
    def record_step(self, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
        """Write what a step of a run is, unless that was written before. Returns what is written.

        Whoever comes second gets what the first wrote. Raises Conflict if a later step is written and this one is not.
        """

    @abstractmethod
    def recorded_step(self, run: str, up_to: int | None = None) -> RecordedStep | None:
        """Return what was written for the newest step of a run, of those up to `up_to`; None if nothing was."""

    @abstractmethod
    def solve_rates(
        self,
        run: str,
        data_source: str,
        instance_ids: Sequence[str] | None = None,
        *,
        min_version: int | None = None,
        solved_at: float = 1.0,
    ) -> Sequence[SolveRate]:
        """Return how often a run's scored rollouts solved these instances, or all that it played, by id.

        Solved is a reward of at least `solved_at`. With `min_version` only rollouts count whose newest token was
        sampled by such weights or newer ones; those of weights without a number count without it alone. Instances
        without a scored rollout are left out.
        """

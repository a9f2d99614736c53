"""Training runs: the verbs beyond single batches, used by `farm.collecting`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.request import Instance
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate


class Runs(ABC):
    """Stored training runs, used by `farm.collecting`. Raises like the verbs of `Farm`."""

    @abstractmethod
    def keyed_batches(self, keys: Sequence[str]) -> Sequence[KeyedBatch]:
        """Return the batches submitted with these idempotency keys, in their order; at most 1,000 keys."""

    @abstractmethod
    def instances(self, group_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the instances of these groups as they were requested, in order, to be requested again.

        Raises NotFound; InvalidRequest for an instance with its own engine key, which is never shown.
        """

    @abstractmethod
    def record_step(self, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
        """Record a step of a run unless it is recorded already. Returns the record that is stored.

        A second writer gets the first one's record. Raises Conflict if a later step is recorded and this one is not.
        """

    @abstractmethod
    def recorded_step(self, run: str, up_to: int | None = None) -> RecordedStep | None:
        """Return the record of the newest step of a run, at most `up_to`; None without one."""

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
        """Return how often a run's scored rollouts solved these instances (None: all of the run), by id.

        Solved is a reward of at least `solved_at`. With `min_version`, only rollouts count whose newest token was
        sampled by that version or a newer one, and none of weights without a number. Instances without a scored
        rollout are left out.
        """

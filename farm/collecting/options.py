"""The options of collecting, with the names of verl, SkyRL, slime and the farm's own requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from farm.errors import InvalidRequest

_WAVES_OF_A_STEP = 8


@dataclass(frozen=True, slots=True)
class CollectingOptions:
    """The rules for collecting a step's groups. Raises InvalidRequest that names each wrong option.

    `train_batch_size`: groups of a step (verl's `data.train_batch_size`).

    `gen_batch_size`: instances requested at a time, in one batch (verl's `data.gen_batch_size`). Default: an eighth of
    a step, or the number allowed in flight. A smaller value refills free places sooner.

    `max_inflight_groups`: groups in flight (slime's `over_sampling_batch_size`). Default: `train_batch_size`; if
    leftovers are cancelled, no more than the step still lacks at the present rate of acceptance. A given number applies
    until the end of the step: it over-samples, the first groups to end make the step, and the rest is cancelled.

    `max_num_gen_batches`: limit of instances requested by one step, in units of `train_batch_size` (SkyRL's
    `max_sample_batches`, verl's option of this name); beyond it `StepCollector.collect` raises. 0 or less: no limit.

    `filter_groups`: `drop` leaves out groups whose scored samples all have one reward, `keep` takes them (verl's
    `filter_groups.enable`, SkyRL's `dynamic_sampling.type`).

    `min_samples`: scored samples that a group must have; default: all. A group with fewer is dropped. An accepted group
    keeps its failed members, which have no reward and make no rows.

    `early_stop_samples`: a group is complete with this many scored samples, and its others are cancelled (ProRL's
    `early_stop_min_usable_sessions`); default: wait for all. It favours samples that end soon: see the docs.

    `leftovers`: when a step has its groups, `carry_over` lets those in flight continue into later steps; `cancel` ends
    them, and the next step requests their instances again, before fresh ones. Then finished samples that are not too
    old are kept, and only the others run. Default: `carry_over`, or `cancel` if `max_staleness` is 0.

    `max_staleness`: weight versions that any sample may be behind when its group is given to the trainer; None: any. If
    weights have no numbers, steps count instead. 0 is on-policy, and leaves nothing to carry over. The instance of a
    group that is too old is requested again; samples that are not too old are kept.
    """

    train_batch_size: int
    gen_batch_size: int | None = None
    max_inflight_groups: int | None = None
    max_num_gen_batches: int = 30
    filter_groups: Literal["drop", "keep"] = "drop"
    min_samples: int | None = None
    early_stop_samples: int | None = None
    leftovers: Literal["cancel", "carry_over"] | None = None
    max_staleness: int | None = 0

    def __post_init__(self) -> None:
        if complaints := list(self._complaints()):
            raise InvalidRequest.of(complaints)

    @property
    def carries_over(self) -> bool:
        """True if groups in flight continue when a step is complete."""
        return self.max_staleness != 0 if self.leftovers is None else self.leftovers == "carry_over"

    @property
    def wave_size(self) -> int:
        eighth = max(1, self.train_batch_size // _WAVES_OF_A_STEP)
        # a larger wave would never fit
        return self.gen_batch_size or min(eighth, self.max_inflight_groups or eighth)

    @property
    def most_in_flight(self) -> int:
        return self.max_inflight_groups or max(self.train_batch_size, self.wave_size)

    def most_wanted(self, n_missing: int, accepted_share: float) -> int:
        """Return the limit of groups in flight for a step that lacks `n_missing`, at this rate of acceptance.

        If leftovers are cancelled, groups in flight at the end of a step are lost.
        """
        if self.carries_over or self.max_inflight_groups is not None:
            return self.most_in_flight
        return min(self.most_in_flight, math.ceil(n_missing / accepted_share))

    def most_ahead(self, *, collects: bool) -> int | None:
        """Return how many groups, in flight or waiting, can still train in time (AReaL's rule); None: any number.

        A trainer that `collects` takes the next of them before its weights change, others only after that.
        """
        if not self.carries_over or self.max_staleness is None:
            return None
        return (self.max_staleness + collects) * self.train_batch_size

    @property
    def most_requested(self) -> int | None:
        """Limit of instances requested by one step; None: any number."""
        return self.max_num_gen_batches * self.train_batch_size if self.max_num_gen_batches > 0 else None

    def check_samples(self, n_samples: int) -> int:
        """Return the scored samples that a group of this size must have. Raises InvalidRequest naming the option."""
        least = self.early_stop_samples if self.min_samples is None else self.min_samples
        least = n_samples if least is None else least
        for name in ("min_samples", "early_stop_samples"):
            if (value := getattr(self, name)) is not None and value > n_samples:
                raise InvalidRequest(f"{value}, but a group has n_samples={n_samples}", field=name)
        if self.filter_groups == "drop" and least < 2:
            option = "early_stop_samples" if self.min_samples is None else "min_samples"
            name = "n_samples" if n_samples < 2 else option
            raise InvalidRequest("one sample has no variance: set 2 or more, or filter_groups='keep'", field=name)
        return least

    def _complaints(self) -> Iterator[tuple[str, str]]:
        yield from _not_a_count("train_batch_size", self.train_batch_size, 1)
        for name in ("gen_batch_size", "max_inflight_groups", "min_samples", "early_stop_samples"):
            if (value := getattr(self, name)) is not None:
                yield from _not_a_count(name, value, 1)
        yield from _not_a_count("max_num_gen_batches", self.max_num_gen_batches, None)
        yield from _not_one_of("filter_groups", self.filter_groups, ("drop", "keep"))
        if self.leftovers is not None:
            yield from _not_one_of("leftovers", self.leftovers, ("cancel", "carry_over"))
        if self.max_staleness is not None:
            yield from _not_a_count("max_staleness", self.max_staleness, 0)
        if self.leftovers == "carry_over" and self.max_staleness == 0:
            yield "max_staleness", "0 leaves nothing to carry over: 1 or more, or leftovers='cancel'"
        least, stop = self.min_samples, self.early_stop_samples
        if isinstance(least, int) and isinstance(stop, int) and 0 < stop < least:
            yield "early_stop_samples", f"less than min_samples={least}: what is whole would be dropped"
        most, size = self.max_inflight_groups, self.gen_batch_size
        if isinstance(most, int) and isinstance(size, int) and 0 < most < size:
            yield "max_inflight_groups", f"less than gen_batch_size={size}: no wave would fit"


def _not_a_count(name: str, value: Any, least: int | None) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool) or not isinstance(value, int):
        yield name, f"a whole number is wanted, not {value!r}"
    elif least is not None and value < least:
        yield name, f"{least} at least, not {value}"


def _not_one_of(name: str, value: Any, values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if value not in values:
        yield name, f"one of {', '.join(values)}, not {value!r}"

"""The options of collecting, named as verl, SkyRL, slime and the farm's own requests name them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from farm.errors import InvalidRequest

_WAVES_OF_A_STEP = 8


@dataclass(frozen=True, slots=True)
class CollectingOptions:
    """The rules by which a step's groups are collected. Raises InvalidRequest that names each option that is wrong.

    `train_batch_size`: the groups of a step (verl's `data.train_batch_size`).

    `gen_batch_size`: the instances asked for at a time, in one batch (verl's `data.gen_batch_size`); by default an
    eighth of a step, or what may be in flight. The smaller it is, the sooner a place that became free is used.

    `max_inflight_groups`: the groups in flight at a time (slime's `over_sampling_batch_size`). By default
    `train_batch_size`, and where what is left over is cancelled no more than the step still lacks, by the share of
    groups that was accepted. A number that is given is kept to the end: it over-samples, the first groups to end make
    the step, and more is cancelled.

    `max_num_gen_batches`: the most instances that one step asks for, in units of `train_batch_size` (SkyRL's
    `max_sample_batches`, verl's option of this name); then `StepCollector.collect` raises. 0 or less: no limit.

    `filter_groups`: `drop` leaves out groups whose scored samples all have one reward, `keep` takes them (verl's
    `filter_groups.enable`, SkyRL's `dynamic_sampling.type`).

    `min_samples`: the scored samples that a group must have; by default all. A group with fewer is dropped, and one
    with more keeps its broken members, which have no reward and make no rows.

    `early_stop_samples`: a group is whole with so many scored samples, and what is left of it is cancelled (ProRL's
    `early_stop_min_usable_sessions`); by default it waits for all. It favours samples that end soon: see the docs.

    `leftovers`: when a step has its groups, `carry_over` lets go on what is still in flight, and takes it into later
    steps; `cancel` ends it, and the next step requests its instances again, before fresh ones. Samples that had
    finished and are not too old are kept then, and only the others are played. By default `carry_over`, or `cancel`
    where `max_staleness` is 0.

    `max_staleness`: how many versions of the weights any sample may be behind when its group is given to the trainer;
    None: any. Where weights have no numbers, steps are counted instead. 0 is on-policy, and leaves nothing to carry
    over. The instance of a group that is too old is requested again; samples that are not too old are kept.
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
        """True if what is in flight goes on when a step has its groups."""
        return self.max_staleness != 0 if self.leftovers is None else self.leftovers == "carry_over"

    @property
    def wave_size(self) -> int:
        eighth = max(1, self.train_batch_size // _WAVES_OF_A_STEP)
        # a wave that does not fit would never be asked for
        return self.gen_batch_size or min(eighth, self.max_inflight_groups or eighth)

    @property
    def most_in_flight(self) -> int:
        return self.max_inflight_groups or max(self.train_batch_size, self.wave_size)

    def most_wanted(self, n_missing: int, accepted_share: float) -> int:
        """Return the most groups in flight while a step lacks `n_missing`, and so large a share of groups is accepted.

        What is in flight at the end of a step is lost where it is cancelled.
        """
        if self.carries_over or self.max_inflight_groups is not None:
            return self.most_in_flight
        return min(self.most_in_flight, math.ceil(n_missing / accepted_share))

    def most_ahead(self, *, collects: bool) -> int | None:
        """Return how many groups, in flight or waiting, can still train in time, as AReaL counts; None: any number.

        A trainer that `collects` takes the next of them before its weights change, and else only after that.
        """
        if not self.carries_over or self.max_staleness is None:
            return None
        return (self.max_staleness + collects) * self.train_batch_size

    @property
    def most_requested(self) -> int | None:
        """The most instances that one step asks for; None: any number."""
        return self.max_num_gen_batches * self.train_batch_size if self.max_num_gen_batches > 0 else None

    def check_samples(self, n_samples: int) -> int:
        """Return the scored samples that a group of so many must have. Raises InvalidRequest naming the option."""
        least = self.early_stop_samples if self.min_samples is None else self.min_samples
        least = n_samples if least is None else least
        for name in ("min_samples", "early_stop_samples"):
            if (value := getattr(self, name)) is not None and value > n_samples:
                raise InvalidRequest(f"{value}, and a group has n_samples={n_samples}", field=name)
        if self.filter_groups == "drop" and least < 2:
            given = "early_stop_samples" if self.min_samples is None else "min_samples"
            name = "n_samples" if n_samples < 2 else given
            raise InvalidRequest("one sample has no variance: 2 at least, or filter_groups='keep'", field=name)
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

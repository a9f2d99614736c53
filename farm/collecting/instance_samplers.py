"""Samplers of instances: the next ones of a data set for a state that is plain JSON, kept in the store.

A mixture samples data sources by weight, and a curriculum leaves out instances that the run always or never solves, for
a while.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from pydantic import ValidationError

from farm.client.farm import Farm
from farm.client.request_checks import invalid
from farm.errors import InvalidRequest
from farm.records.request import Instance
from farm.records.training_run import SolveRate, check_run
from farm.records.trajectory import NO_VERSION, version_number

SamplerState: TypeAlias = dict[str, Any]
"""The position of a sampler, as JSON; an empty one is its start."""


class InstanceSampler(Protocol):
    """Gives instances without end. It keeps no state: the same state gives the same instances."""

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        """Return the next `n` instances after a state, and the state after them.

        Raises InvalidRequest naming the option, also for a state of another sampler.
        """

    def __len__(self) -> int:
        """Return the number of distinct instances."""


class ShuffledInstances:
    """A data set in epochs: every instance once, in an order determined by the seed and the epoch.

    An instance without an `instance_id` gets a hash of its fields, so that its results can be found. Raises
    InvalidRequest for an empty data set, and for two different problems with one name.
    """

    def __init__(
        self, instances: Sequence[Instance | Mapping[str, Any]], *, seed: int = 0, shuffle: bool = True
    ) -> None:
        self._instances = [_instance(each, index).named() for index, each in enumerate(instances)]
        if not self._instances:
            raise InvalidRequest("there are none", field="instances")
        first: dict[tuple[str, str], int] = {}
        for index, instance in enumerate(self._instances):
            other = first.setdefault((instance.data_source, instance.instance_id), index)
            if self._instances[other].fields != instance.fields:
                raise InvalidRequest(
                    f"{instance.instance_id!r} is also the name of instances[{other}], which has other fields",
                    field=f"instances[{index}].instance_id",
                )
        self._seed = seed
        self._shuffle = shuffle
        self._digest = _digest([[each.data_source, each.instance_id] for each in self._instances] + [[seed, shuffle]])
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        return len(self._instances)

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        start = state.get("drawn", 0)
        if not isinstance(start, int) or state.get("data", self._digest) != self._digest:
            raise InvalidRequest(
                "the run was started with other instances, another order or another seed; use a new run name",
                field="sampler",
            )
        drawn = [self._at(position) for position in range(start, start + n)]
        return drawn, {"drawn": start + n, "data": self._digest}

    def _at(self, position: int) -> Instance:
        epoch, index = divmod(position, len(self._instances))
        return self._instances[self._order(epoch)[index]]

    def _order_of(self, epoch: int) -> list[int]:
        """Return the order of an epoch by hashes, which do not depend on versions of Python or NumPy."""
        order = list(range(len(self._instances)))
        if self._shuffle:
            order.sort(key=lambda index: hashlib.sha256(f"{self._seed}:{epoch}:{index}".encode()).digest())
        return order


def _instance(value: Instance | Mapping[str, Any], index: int) -> Instance:
    if isinstance(value, Instance):
        return value
    try:
        return Instance.model_validate(value)
    except ValidationError as error:
        raise invalid(error, f"instances[{index}]") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


class Curriculum:
    """The instances of a sampler without those that the run solved too often or too seldom, as counted by the store.

    An instance is left out if at least `min_scored` of its rollouts were scored, with a solve rate of at least
    `easy_threshold` or at most `hard_threshold` (prime-rl's names); solved is a reward of at least `solved_at`. Only
    rollouts of the last `last_versions` weight versions count, so an instance comes back after that time; without
    `last_versions`, or if weights have no numbers, it is left out for good.

    Raises InvalidRequest if nothing is left: two epochs in a row without an instance.
    """

    def __init__(
        self,
        sampler: InstanceSampler,
        client: Farm,
        run: str,
        *,
        easy_threshold: float = 1.0,
        hard_threshold: float = 0.0,
        min_scored: int = 1,
        last_versions: int | None = None,
        solved_at: float = 1.0,
    ) -> None:
        check_run(run)
        if not 0.0 <= hard_threshold < easy_threshold <= 1.0:
            raise InvalidRequest(
                f"0 <= hard_threshold < easy_threshold <= 1 must hold, not {hard_threshold} and {easy_threshold}",
                field="easy_threshold",
            )
        for name, value in (("min_scored", min_scored), ("last_versions", last_versions)):
            if value is not None and value < 1:
                raise InvalidRequest(f"must be at least 1, not {value}", field=name)
        self._sampler = sampler
        self._client = client
        self._run = run
        self._easy, self._hard = easy_threshold, hard_threshold
        self._min_scored = min_scored
        self._last_versions = last_versions
        self._solved_at = solved_at

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        if state and not {"skipped", "of"} <= state.keys():
            raise InvalidRequest("the run was started with another sampler; use a new run name", field="sampler")
        inner, n_skipped, in_a_row = state.get("of", {}), state.get("skipped", 0), 0
        drawn: list[Instance] = []
        while len(drawn) < n:
            some, inner = self._sampler.draw(n - len(drawn), inner)
            taken = self._without_easy_and_hard(some)
            n_skipped += len(some) - len(taken)
            in_a_row = 0 if taken else in_a_row + len(some)
            drawn += taken
            if in_a_row > 2 * len(self):
                raise InvalidRequest(
                    f"all {len(self)} instances of run {self._run} are solved at a rate of {self._easy:g} or more, or "
                    f"of {self._hard:g} or less: widen easy_threshold and hard_threshold, or add other instances",
                    field="easy_threshold",
                )
        return drawn, {"skipped": n_skipped, "of": inner}

    def _without_easy_and_hard(self, instances: Sequence[Instance]) -> list[Instance]:
        by_source: defaultdict[str, list[str]] = defaultdict(list)
        for instance in instances:
            by_source[instance.data_source].append(instance.instance_id)
        min_version = self._min_version()
        left_out = {
            (source, each.instance_id)
            for source, ids in by_source.items()
            for each in self._client.runs.solve_rates(
                self._run, source, ids, min_version=min_version, solved_at=self._solved_at
            )
            if self._leaves_out(each)
        }
        return [each for each in instances if (each.data_source, each.instance_id) not in left_out]

    def _min_version(self) -> int | None:
        if self._last_versions is None:
            return None
        newest = version_number(self._client.newest_version())
        return None if newest == NO_VERSION else newest - self._last_versions + 1

    def _leaves_out(self, solved: SolveRate) -> bool:
        return solved.n_scored >= self._min_scored and not self._hard < solved.rate < self._easy


class Mixture:
    """Instances of several samplers, in the ratio of their weights (prime-rl's `env_ratios`), evenly spread.

    Not random, but smooth weighted round robin: each draw gives every sampler credit by its weight; the one with the
    most (the first of equals) pays 1 and is drawn from. So any n consecutive draws contain each about n times its
    share. Changed weights apply from the next draw on.
    """

    def __init__(self, samplers: Mapping[str, InstanceSampler], weights: Mapping[str, float]) -> None:
        if not samplers:
            raise InvalidRequest("there are none", field="samplers")
        for name in samplers.keys() ^ weights.keys():
            raise InvalidRequest(f"{name!r} is in only one of samplers and weights", field="weights")
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise InvalidRequest(f"must be a number above 0, not {weight!r}", field=f"weights[{name!r}]")
        self._samplers = dict(samplers)
        total = sum(weights.values())
        self._shares = {name: weights[name] / total for name in samplers}

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self._samplers.values())

    def draw(self, n: int, state: SamplerState) -> tuple[list[Instance], SamplerState]:
        credit = {name: state.get("credit", {}).get(name, 0.0) for name in self._samplers}
        inner = {name: state.get("of", {}).get(name, {}) for name in self._samplers}
        if state and not {"credit", "of"} <= state.keys():
            raise InvalidRequest("the run was started with another sampler; use a new run name", field="sampler")
        chosen = [self._next(credit) for _ in range(n)]
        drawn: dict[str, list[Instance]] = {}
        for name, sampler in self._samplers.items():
            drawn[name], inner[name] = sampler.draw(chosen.count(name), inner[name])
        # a sampler that is left out for a while continues where it was
        of = state.get("of", {}) | inner
        rest = {name: iter(instances) for name, instances in drawn.items()}
        return [next(rest[name]) for name in chosen], {"credit": credit, "of": of}

    def _next(self, credit: dict[str, float]) -> str:
        for name, share in self._shares.items():
            credit[name] += share
        chosen = max(credit, key=lambda name: credit[name])
        credit[chosen] -= 1.0
        return chosen

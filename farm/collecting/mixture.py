"""Mixing of data sources by weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

from farm.collecting.instance_samplers import InstanceSampler, SamplerState
from farm.errors import InvalidRequest
from farm.records.request import Instance


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

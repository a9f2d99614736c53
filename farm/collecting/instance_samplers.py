"""Samplers of instances: the next ones of a data set for a state that is plain JSON, kept in the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from pydantic import ValidationError

from farm.client.request_checks import invalid
from farm.errors import InvalidRequest
from farm.records.request import Instance

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
        drawn = [self._at(place) for place in range(start, start + n)]
        return drawn, {"drawn": start + n, "data": self._digest}

    def _at(self, place: int) -> Instance:
        epoch, index = divmod(place, len(self._instances))
        return self._instances[self._order(epoch)[index]]

    def _order_of(self, epoch: int) -> list[int]:
        """Return the order of an epoch by hashes, which do not depend on versions of Python or NumPy."""
        places = list(range(len(self._instances)))
        if self._shuffle:
            places.sort(key=lambda place: hashlib.sha256(f"{self._seed}:{epoch}:{place}".encode()).digest())
        return places


def _instance(value: Instance | Mapping[str, Any], index: int) -> Instance:
    if isinstance(value, Instance):
        return value
    try:
        return Instance.model_validate(value)
    except ValidationError as error:
        raise invalid(error, f"instances[{index}]") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

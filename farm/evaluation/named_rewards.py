"""The named rewards of an evaluation's rollouts, if its evaluators return several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from farm.records.rollout import Reward, Rollout

NamedRewards: TypeAlias = Mapping[str, Mapping[str, float]]
"""By the id of the rollout, and by name."""


class HasRewards(Protocol):
    """The needed part of a client."""

    def rewards(self, rollout_id: str) -> Sequence[Reward]:
        """Return the scores of a rollout; the last one counts."""
        ...


def named_rewards(client: HasRewards, rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
    """Return the named rewards of scored rollouts, for data sources whose scores have them.

    Checks one rollout of each source first, since each rollout is a request.
    """
    has_names: dict[str, bool] = {}
    result = {}
    for rollout in rollouts:
        if not rollout.trainable or not has_names.get(rollout.data_source, True):
            continue
        scores = client.rewards(rollout.rollout_id)
        found = scores[-1].rewards if scores else {}
        has_names.setdefault(rollout.data_source, bool(found))
        if found:
            result[rollout.rollout_id] = dict(found)
    return result

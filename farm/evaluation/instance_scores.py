"""The scores of instances, which an evaluation counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from farm.evaluation.named_rewards import NamedRewards
from farm.evaluation.pass_at_k import pass_at_k
from farm.records.rollout import Rollout

NO_NAMES: NamedRewards = {}


@dataclass(frozen=True, slots=True)
class InstanceScores:
    """The rewards of an instance's scored samples, by sample; `n_unscored` more have none.

    `named` are the named rewards of samples whose evaluator returns several.
    """

    data_source: str
    instance_id: str
    rewards: tuple[float, ...]
    n_unscored: int = 0
    named: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.data_source, self.instance_id

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def passed(self, k: int, solved_at: float) -> float:
        """Return the estimate of pass@k; a reward of at least `solved_at` is a pass. Needs k scored samples."""
        return pass_at_k(len(self.rewards), sum(reward >= solved_at for reward in self.rewards), k)


def scores_of(rollouts: Iterable[Rollout], named: NamedRewards = NO_NAMES) -> list[InstanceScores]:
    """Return the scores of each instance, in the order of first occurrence.

    Groups of one instance count as one, with all their samples; a group without a name is separate.
    """
    members: defaultdict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        members[rollout.data_source, rollout.instance_id or f"#{rollout.group_index}"].append(rollout)
    result = []
    for (source, name), samples in members.items():
        rewards = tuple(each.reward for each in samples if each.trainable and each.reward is not None)
        result.append(InstanceScores(source, name, rewards, len(samples) - len(rewards), _by_name(samples, named)))
    return result


def _by_name(samples: Iterable[Rollout], named: NamedRewards) -> dict[str, tuple[float, ...]]:
    result: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, reward in named.get(sample.rollout_id, {}).items():
            result[name].append(reward)
    return {name: tuple(rewards) for name, rewards in result.items()}

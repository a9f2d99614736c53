"""The report of an evaluation: avg@k and pass@k with their intervals, by data source, and rollouts without a score."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from farm.errors import InvalidRequest
from farm.evaluation.instance_scores import NO_NAMES, InstanceScores, scores_of
from farm.evaluation.named_rewards import NamedRewards
from farm.evaluation.resampling import Estimate, estimate
from farm.records.rollout import Rollout, State

ALL = "all"
"""The row of all data sources together, in which each instance counts once."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One data source. `n_short` of its instances have fewer than k scored samples, `n_unscored` of these none.

    `average` is the mean over instances of their mean reward; `passed` is pass@j by j, over instances with at least j
    scored samples; None without such an instance. `named` has the average of each named reward, if evaluators return
    several.
    """

    n_instances: int
    n_short: int
    n_unscored: int
    average: Estimate | None
    passed: dict[int, Estimate | None]
    named: dict[str, Estimate | None] = field(default_factory=dict)


class _StoredScores(BaseModel):
    """An instance of a stored report."""

    data_source: str
    instance_id: str
    rewards: list[FiniteFloat]
    n_unscored: int = Field(ge=0)
    named: dict[str, list[FiniteFloat]] = Field(default_factory=dict)


class _StoredReport(BaseModel):
    """The fields of a stored report that a comparison needs; the rest follows from them."""

    name: str
    batch_id: str
    model: str
    n_samples: int = Field(ge=1)
    solved_at: FiniteFloat
    n_rollouts: int = Field(ge=0)
    versions: list[int | None] = Field(min_length=2, max_length=2)
    unscored: dict[str, list[str]]
    instances: list[_StoredScores]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation: `n_samples` is k; `unscored` has the ids of rollouts without a score, by cause.

    `model` is the requested name, `versions` the oldest and the newest weights that sampled, by number.
    """

    name: str
    batch_id: str
    model: str
    n_samples: int
    solved_at: float
    n_rollouts: int
    versions: tuple[int | None, int | None]
    sources: dict[str, SourceReport]
    unscored: dict[str, list[str]]
    instances: list[InstanceScores] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values for JSON; `from_json` reads the part needed for a comparison."""
        values = asdict(self)
        values["versions"] = list(self.versions)
        for source in values["sources"].values():
            source["passed"] = {str(k): value for k, value in source["passed"].items()}
        return values

    @classmethod
    def from_json(cls, values: Any, place: str) -> EvaluationReport:
        """Read a stored report from its instances. Raises InvalidRequest, naming the place, for an invalid one."""
        try:
            stored = _StoredReport.model_validate(values, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise InvalidRequest(f"not a report of `farm eval`: {where}: {first['msg']}", field=place) from None
        instances = [
            InstanceScores(
                each.data_source,
                each.instance_id,
                tuple(each.rewards),
                each.n_unscored,
                {name: tuple(rewards) for name, rewards in each.named.items()},
            )
            for each in stored.instances
        ]
        if twice := [key for key, n in Counter(each.key for each in instances).items() if n > 1]:
            raise InvalidRequest(f"it has the instance {' '.join(twice[0])} twice", field=place)
        named = (stored.name, stored.batch_id, stored.model)
        k, solved_at = stored.n_samples, stored.solved_at
        rest = (stored.n_rollouts, (stored.versions[0], stored.versions[1]))
        unscored = stored.unscored
        return cls(*named, k, solved_at, *rest, _sources(instances, k, solved_at), unscored, instances)


def report_of(
    rollouts: Sequence[Rollout],
    *,
    n_samples: int,
    name: str = "",
    batch_id: str = "",
    model: str = "",
    solved_at: float = 1.0,
    named: NamedRewards = NO_NAMES,
) -> EvaluationReport:
    """Return the report of ended rollouts; `n_samples` is the k of avg@k, `named` are rewards by name."""
    instances = scores_of(rollouts, named)
    unscored: defaultdict[str, list[str]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.trainable:
            unscored[_ended_by(rollout)].append(rollout.rollout_id)
    oldest = min((each.version_min for each in rollouts if each.version_min is not None), default=None)
    newest = max((each.version_max for each in rollouts if each.version_max is not None), default=None)
    sources = _sources(instances, n_samples, solved_at)
    counts = (n_samples, solved_at, len(rollouts), (oldest, newest))
    return EvaluationReport(name, batch_id, model, *counts, sources, dict(unscored), instances)


def _ended_by(rollout: Rollout) -> str:
    if rollout.failure is not None and rollout.state is State.FAILED:
        return rollout.failure.kind
    return str(rollout.outcome or rollout.state)


def _sources(instances: Sequence[InstanceScores], k: int, solved_at: float) -> dict[str, SourceReport]:
    by_source: defaultdict[str, list[InstanceScores]] = defaultdict(list)
    for instance in instances:
        by_source[instance.data_source].append(instance)
    result = {source: _source(some, k, solved_at) for source, some in sorted(by_source.items())}
    return result | {ALL: _source(instances, k, solved_at)} if len(by_source) > 1 else result


def _source(instances: Sequence[InstanceScores], k: int, solved_at: float) -> SourceReport:
    return SourceReport(
        n_instances=len(instances),
        n_short=sum(len(each.rewards) < k for each in instances),
        n_unscored=sum(not each.rewards for each in instances),
        average=estimate([each.mean for each in instances if each.rewards]),
        passed={
            j: estimate([each.passed(j, solved_at) for each in instances if len(each.rewards) >= j])
            for j in powers_up_to(k)
        },
        named={
            name: estimate([fmean(each.named[name]) for each in instances if each.named.get(name)])
            for name in sorted({name for each in instances for name in each.named})
        },
    )


def powers_up_to(k: int) -> list[int]:
    """Return the reported j of pass@j: 1, 2, 4 … below k, and k."""
    return sorted({*(2**power for power in range(k.bit_length()) if 2**power < k), k})


def short_instances(report: EvaluationReport) -> Mapping[str, int]:
    """Return the number of scored samples of instances that have fewer than k, by name."""
    return {
        f"{each.data_source} {each.instance_id}": len(each.rewards)
        for each in report.instances
        if len(each.rewards) < report.n_samples
    }

"""The report of an evaluation: avg@k and pass@k with their intervals, by data source, and rollouts without a score.

Two reports on the same instances are compared by differences with intervals and a paired test. Intervals are percentile
bootstraps, and the test is the sign-flip permutation test; both are seeded, so that one evaluation always reports the
same numbers.

The key of its batch derives from its contents, so that an interrupted evaluation continues.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from farm.client.farm import Farm
from farm.client.request_checks import checked_request
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Reward, Rollout, State
from farm.records.training_run import check_run

NamedRewards: TypeAlias = Mapping[str, Mapping[str, float]]
"""By the id of the rollout, and by name."""
NO_NAMES: NamedRewards = {}
ALL = "all"
"""The row of all data sources together, in which each instance counts once."""
N_RESAMPLES = 10_000
CONFIDENCE = 0.95
_MOST_EXACT = 14
"""Up to this many non-zero differences, all 2^n signs are enumerated."""
_CELLS = 4_000_000
_SEED = 20_210_707


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k), the unbiased estimate (arXiv:2107.03374, section 2.1). Needs k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"there is no pass@{k} of {c} right ones among {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


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
    by_rollout = {}
    for rollout in rollouts:
        if not rollout.trainable or not has_names.get(rollout.data_source, True):
            continue
        scores = client.rewards(rollout.rollout_id)
        rewards = scores[-1].rewards if scores else {}
        has_names.setdefault(rollout.data_source, bool(rewards))
        if rewards:
            by_rollout[rollout.rollout_id] = dict(rewards)
    return by_rollout


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
    scores = []
    for (source, name), samples in members.items():
        rewards = tuple(each.reward for each in samples if each.trainable and each.reward is not None)
        scores.append(InstanceScores(source, name, rewards, len(samples) - len(rewards), _by_name(samples, named)))
    return scores


def _by_name(samples: Iterable[Rollout], named: NamedRewards) -> dict[str, tuple[float, ...]]:
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, reward in named.get(sample.rollout_id, {}).items():
            by_name[name].append(reward)
    return {name: tuple(rewards) for name, rewards in by_name.items()}


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
    def from_json(cls, values: Any, field: str) -> EvaluationReport:
        """Read a stored report from its instances. Raises InvalidRequest, naming `field`, for an invalid one."""
        try:
            stored = _StoredReport.model_validate(values, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise InvalidRequest(f"not a report of `farm eval`: {where}: {first['msg']}", field=field) from None
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
        if repeated := [key for key, n in Counter(each.key for each in instances).items() if n > 1]:
            raise InvalidRequest(f"it has the instance {' '.join(repeated[0])} twice", field=field)
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
    reports = {source: _source(some, k, solved_at) for source, some in sorted(by_source.items())}
    return reports | {ALL: _source(instances, k, solved_at)} if len(by_source) > 1 else reports


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` instances, with the bounds of its interval."""

    value: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values, one for each instance, with its 95 % percentile bootstrap interval; None for none."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    means = _resampled_means(array)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CELLS // len(values))
    means = [
        values[generator.integers(0, len(values), (min(rows, N_RESAMPLES - start), len(values)))].mean(axis=1)
        for start in range(0, N_RESAMPLES, rows)
    ]
    return np.concatenate(means)


def sign_flip_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of paired differences: the share of sign flips with a mean at least as far from 0.

    Under the null hypothesis each difference is equally likely with either sign. Few differences are flipped in all
    ways; many in 10,000 random ones, which include the observed one (Phipson and Smyth 2010), so p is never 0.
    """
    moved = np.asarray([value for value in differences if value != 0.0], np.float64)
    if not len(moved):
        return 1.0
    seen = abs(float(moved.sum()))
    # sums of the same numbers in another order may differ in the last digits
    bound = seen - 1e-9 * float(np.abs(moved).sum())
    if len(moved) <= _MOST_EXACT:
        flips = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float((np.abs((1.0 - 2.0 * flips) @ moved) >= bound).mean())
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CELLS // len(moved))
    n_as_far = 0
    for start in range(0, N_RESAMPLES, rows):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (min(rows, N_RESAMPLES - start), len(moved)))
        n_as_far += int((np.abs(signs @ moved) >= bound).sum())
    return (n_as_far + 1) / (N_RESAMPLES + 1)


@dataclass(frozen=True, slots=True)
class Difference:
    """This evaluation minus the other, over the instances of both, with the p-value of the sign-flip test."""

    estimate: Estimate
    p_value: float
    n_better: int
    n_worse: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of avg@k and of pass@k by data source; k is the smaller of the two. None without pairs.

    `only_here` and `only_there` are instances without a score in one of the two: they are not compared.
    """

    name: str
    other: str
    n_samples: int
    average: dict[str, Difference | None]
    passed: dict[str, Difference | None]
    only_here: list[str]
    only_there: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Pair = tuple[InstanceScores, InstanceScores]


def compare(this: EvaluationReport, other: EvaluationReport) -> Comparison:
    """Compare two evaluations by their common instances. Raises InvalidRequest if there is none."""
    own_scores, other_scores = (
        {each.key: each for each in report.instances if each.rewards} for report in (this, other)
    )
    pairs = [(scores, other_scores[key]) for key, scores in own_scores.items() if key in other_scores]
    if not pairs:
        raise InvalidRequest(f"{this.name} and {other.name} have no scored instance in common", field="compare")
    if this.solved_at != other.solved_at:
        raise InvalidRequest(f"{this.solved_at:g} here and {other.solved_at:g} there", field="solved_at")
    k = min(this.n_samples, other.n_samples)
    by_source: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[0].data_source].append(pair)
    rows = dict(sorted(by_source.items())) | ({ALL: pairs} if len(by_source) > 1 else {})
    return Comparison(
        name=this.name,
        other=other.name,
        n_samples=k,
        average={source: _difference([a.mean - b.mean for a, b in some]) for source, some in rows.items()},
        passed={
            source: _difference(
                [
                    a.passed(k, this.solved_at) - b.passed(k, this.solved_at)
                    for a, b in some
                    if min(len(a.rewards), len(b.rewards)) >= k
                ]
            )
            for source, some in rows.items()
        },
        only_here=[" ".join(key) for key in own_scores if key not in other_scores],
        only_there=[" ".join(key) for key in other_scores if key not in own_scores],
    )


def _difference(values: Sequence[float]) -> Difference | None:
    mean = estimate(values)
    if mean is None:
        return None
    return Difference(mean, sign_flip_test(values), sum(each > 0 for each in values), sum(each < 0 for each in values))


def evaluation_request(
    problems: Sequence[Instance | Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    name: str | None = None,
    version: str = "",
) -> BatchRequest:
    """Return the request of an evaluation; `request` are the other fields of a batch.

    Its idempotency key is `eval:NAME`; without a name, a hash of the whole request and of the weights' `version`. So
    weights without a number need a new name whenever they change. Instances without a name get one from their contents,
    by which evaluations are compared. Raises InvalidRequest naming the field.
    """
    if request.get("idempotency_key") is not None:
        raise InvalidRequest("the name of the evaluation sets it", field="idempotency_key")
    checked = checked_request({**request, "instances": list(problems)})
    named = checked.model_copy(update={"instances": tuple(instance.named() for instance in checked.instances)})
    if name is None:
        content = [named.model_dump(mode="json", exclude_defaults=True), version]
        name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
    else:
        try:
            check_run(name)
        except InvalidRequest as error:
            raise InvalidRequest(error.complaints[0][1], field="name") from None
    return named.model_copy(update={"idempotency_key": f"eval:{name}"})


def evaluate(
    client: Farm,
    problems: Sequence[Instance | Mapping[str, Any]],
    *,
    n_samples: int = 8,
    name: str | None = None,
    request: Mapping[str, Any] | None = None,
    solved_at: float = 1.0,
    timeout_s: float | None = None,
) -> EvaluationReport:
    """Run problems `n_samples` times each, or continue an interrupted run, and return the report.

    Raises InvalidRequest, Conflict for a name that another evaluation has, TimeoutError.
    """
    fields = {**(request or {}), "n_samples": n_samples}
    submitted = evaluation_request(problems, fields, name=name, version=client.newest_version())
    batch_id = client.submit(submitted)
    client.wait(batch_id, timeout_s)
    shown = (submitted.idempotency_key or "").removeprefix("eval:")
    named = {"name": shown, "batch_id": batch_id, "model": submitted.model}
    rollouts = client.rollouts(batch_id)
    by_name = named_rewards(client, rollouts)
    return report_of(rollouts, n_samples=n_samples, solved_at=solved_at, named=by_name, **named)

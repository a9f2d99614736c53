"""Comparison of two evaluations of the same instances: differences with intervals, and a paired test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farm.errors import InvalidRequest
from farm.evaluation.evaluation_report import ALL, EvaluationReport
from farm.evaluation.instance_scores import InstanceScores
from farm.evaluation.resampling import Estimate, estimate, sign_flip_test


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
    mine, theirs = ({each.key: each for each in report.instances if each.rewards} for report in (this, other))
    pairs = [(scores, theirs[key]) for key, scores in mine.items() if key in theirs]
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
        only_here=[" ".join(key) for key in mine if key not in theirs],
        only_there=[" ".join(key) for key in theirs if key not in mine],
    )


def _difference(values: Sequence[float]) -> Difference | None:
    mean = estimate(values)
    if mean is None:
        return None
    return Difference(mean, sign_flip_test(values), sum(each > 0 for each in values), sum(each < 0 for each in values))

"""Evaluation checked by hand: pass@k, intervals, rollouts without a score, and comparison of two evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, ClassVar

import pytest
from rich.console import Console

from farm.cli.evaluate import differences_table, notes, scores_table
from farm.errors import InvalidRequest
from farm.evaluation import EvaluationReport, compare, pass_at_k, report_of
from farm.evaluation.evaluation_report import (
    estimate,
    evaluation_request,
    named_rewards,
    powers_up_to,
    short_instances,
    sign_flip_test,
)
from farm.records.rollout import Failure, Outcome, Reward, Rollout, Stage, State

BROKEN = None


def rollouts_of(instances: Mapping[str, Sequence[float | None]]) -> list[Rollout]:
    """Return the rollouts of instances, named `SOURCE/ID`, by their rewards."""
    return [
        Rollout(
            rollout_id=f"b.{group}.{sample}",
            batch_id="b",
            group_index=group,
            sample_index=sample,
            data_source=name.split("/")[0],
            instance_id=name.split("/")[1],
            stage=Stage.EVAL,
            state=State.FAILED if reward is BROKEN else State.COMPLETED,
            attempt=1,
            node=None,
            outcome=Outcome.SANDBOX_ERROR if reward is BROKEN else Outcome.ANSWERED,
            reward=reward,
            failure=Failure("sandbox_error", "broke") if reward is BROKEN else None,
            n_turns=1,
            n_response_tokens=1,
            submitted_at=0.0,
            finished_at=1.0,
            finish_seq=1,
        )
        for group, (name, rewards) in enumerate(instances.items())
        for sample, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(4, 1, 2, 1 / 2), (8, 3, 4, 13 / 14), (8, 0, 8, 0.0), (8, 1, 8, 1.0), (8, 8, 1, 1.0), (8, 2, 1, 1 / 4)],
)
def test_pass_at_k_equals_known_values(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass() -> None:
    # with k = 3 and n = 5, of which 2 pass: of 10 subsets only {c, d, e} has none
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / comb(5, 3))
    for wrong in ((3, 4, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*wrong)


def test_interval_of_two_instances_is_known() -> None:
    # resampled, the mean of 0 and 1 is 0 and 1 in a quarter of all draws each
    drawn = estimate([0.0, 1.0])
    assert drawn is not None
    assert (drawn.value, drawn.low, drawn.high, drawn.n) == (0.5, 0.0, 1.0, 2)
    same = estimate([0.7] * 5)
    assert same is not None
    assert (same.low, same.high) == pytest.approx((0.7, 0.7))
    assert estimate([]) is None


def test_interval_narrows_like_the_normal_one() -> None:
    drawn = estimate([0.0, 1.0] * 200)
    assert drawn is not None
    half = 1.96 * 0.5 / 400**0.5
    assert (drawn.low, drawn.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.006)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 1.0, 1.0], 2 / 8),
        ([2.0, 1.0], 2 / 4),
        ([1.0, -1.0], 1.0),
        ([0.1, 0.1, 0.1, 0.0, 0.0], 2 / 8),
        ([0.0, 0.0], 1.0),
        ([], 1.0),
        # 3, 2 and 1: sums with an absolute value of 4 or more are +-6 and +-4
        ([3.0, 2.0, -1.0], 4 / 8),
    ],
)
def test_sign_flip_test_of_few_pairs_is_exact(differences: list[float], p: float) -> None:
    assert sign_flip_test(differences) == pytest.approx(p)


def test_sign_flip_test_of_many_pairs_is_drawn() -> None:
    assert sign_flip_test([1.0] * 40) == pytest.approx(1 / 10_001)
    assert sign_flip_test([1.0, -1.0] * 20) == pytest.approx(1.0)
    # 25 up and 15 down: P(at least 25 or at most 15 of 40 heads) = 0.1539
    assert sign_flip_test([1.0] * 25 + [-1.0] * 15) == pytest.approx(0.1539, abs=0.012)


REPORT: Mapping[str, Sequence[float | None]] = {
    "math/x": (1.0, 0.0),
    "math/y": (1.0, 1.0),
    "math/z": (1.0, BROKEN),
    "code/w": (BROKEN, BROKEN),
}


def test_report_counts_scored_samples_and_names_the_others() -> None:
    report = report_of(rollouts_of(REPORT), n_samples=2, name="r", batch_id="b")
    math, code, both = (report.sources[name] for name in ("math", "code", "all"))
    assert (math.n_instances, math.n_short, math.n_unscored) == (3, 1, 0)
    assert math.average is not None
    # means of x, y, z: 1/2, 1, 1
    assert math.average.value == pytest.approx(5 / 6)
    passed = {k: (each.n, round(each.value, 6)) for k, each in math.passed.items() if each}
    assert passed == {1: (3, round(5 / 6, 6)), 2: (2, 1.0)}
    assert (code.n_instances, code.n_short, code.n_unscored, code.average) == (1, 1, 1, None)
    assert code.passed == {1: None, 2: None}
    assert (both.n_instances, both.n_short, both.n_unscored) == (4, 2, 1)
    assert both.average is not None
    assert both.average.n == 3
    assert both.average.value == pytest.approx(5 / 6)
    assert report.unscored == {"sandbox_error": ["b.2.1", "b.3.0", "b.3.1"]}
    assert short_instances(report) == {"math z": 1, "code w": 0}


def test_samples_of_one_instance_in_two_groups_count_together() -> None:
    twice = [*rollouts_of({"math/x": (1.0, 0.0)}), *rollouts_of({"math/x": (0.0, 0.0)})]
    (scores,) = report_of(twice, n_samples=4).instances
    assert scores.rewards == (1.0, 0.0, 0.0, 0.0)
    assert scores.passed(2, 1.0) == pytest.approx(1 / 2)


def test_named_rewards_are_averaged_too() -> None:
    class Scores:
        queried: ClassVar[list[str]] = []

        def rewards(self, rollout_id: str) -> list[Reward]:
            self.queried.append(rollout_id)
            names = {} if rollout_id.startswith("b.2") else {"farm": 1.0, "authors": float(rollout_id == "b.0.0")}
            return [Reward(0.0, {}, "e", 0.0, {"farm": 9.0}), Reward(1.0, {}, "e", 1.0, names)]

    rollouts = rollouts_of({"math/x": (1.0, 1.0), "math/y": (1.0, BROKEN), "code/z": (1.0, 1.0)})
    named = named_rewards(Scores(), rollouts)
    # for a source without names, one rollout is queried, and no broken one
    assert Scores.queried == ["b.0.0", "b.0.1", "b.1.0", "b.2.0"]
    report = report_of(rollouts, n_samples=2, name="r", named=named)
    averages = {name: each.value for name, each in report.sources["math"].named.items() if each}
    assert averages == {"authors": 0.25, "farm": 1.0}
    assert report.sources["code"].named == {}
    assert EvaluationReport.from_json(json.loads(json.dumps(report.as_json())), "file") == report
    console = Console(width=200, record=True)
    console.print(scores_table(report))
    assert "authors: avg@2" in console.export_text()


def test_values_of_k_are_powers_of_two_and_k() -> None:
    assert [powers_up_to(k) for k in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_partial_rewards_are_averaged_and_pass_from_a_threshold() -> None:
    (scores,) = report_of(rollouts_of({"math/x": (0.5, 0.25)}), n_samples=2).instances
    assert scores.mean == 0.375
    assert (scores.passed(1, 1.0), scores.passed(1, 0.5)) == (0.0, 0.5)


def test_report_is_read_back() -> None:
    report = report_of(rollouts_of(REPORT), n_samples=2, name="r", batch_id="b")
    assert EvaluationReport.from_json(json.loads(json.dumps(report.as_json())), "file") == report
    written = report.as_json()
    scores = written["instances"][0]
    wrongs: list[Any] = [[], {"instances": 3}, {"name": "r"}]
    wrongs += [written | {"n_samples": k} for k in (0, -1, 2.5, True)]
    # values that would be read as other rewards, or make every comparison empty
    values: list[Any] = ["10", {"1": 2}, [True], [float("nan")], [float("inf")], None]
    wrongs += [written | {"instances": [scores | {"rewards": value}]} for value in values]
    wrongs += [
        written | {"instances": [scores, scores]},
        written | {"versions": ["1", {}]},
        written | {"versions": "12"},
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest) as error:
            EvaluationReport.from_json(wrong, "old.json")
        assert error.value.field == "old.json"


def test_two_evaluations_are_paired_by_instance() -> None:
    this = report_of(rollouts_of({**REPORT, "math/new": (1.0, 1.0)}), n_samples=2, name="this")
    other = report_of(
        rollouts_of({"math/z": (0.0, 0.0), "math/x": (0.0, 0.0), "math/y": (1.0, 0.0), "math/old": (1.0, 1.0)}),
        n_samples=2,
        name="other",
    )
    comparison = compare(this, other)
    average, passed = comparison.average["math"], comparison.passed["math"]
    assert average is not None
    assert passed is not None
    # x: 1/2 - 0, y: 1 - 1/2, z: 1 - 0; all three up, 2 of 8 ways to flip are as extreme
    assert average.estimate.value == pytest.approx(2 / 3)
    assert (average.estimate.n, average.n_better, average.n_worse) == (3, 3, 0)
    assert average.p_value == pytest.approx(2 / 8)
    # pass@2 omits z, which has one scored sample here: x 1 - 0, y 1 - 1
    assert (passed.estimate.n, passed.estimate.value, passed.p_value) == (2, 0.5, 1.0)
    assert (comparison.only_here, comparison.only_there) == (["math new"], ["math old"])
    assert "all" not in comparison.average
    json.dumps(comparison.as_json())


def test_evaluations_without_common_instances_cannot_be_compared() -> None:
    this = report_of(rollouts_of({"math/x": (1.0,)}), n_samples=1)
    with pytest.raises(InvalidRequest, match="in common"):
        compare(this, report_of(rollouts_of({"math/y": (1.0,)}), n_samples=1))
    with pytest.raises(InvalidRequest, match="solved_at"):
        compare(this, report_of(rollouts_of({"math/x": (1.0,)}), n_samples=1, solved_at=0.5))


def test_tables_contain_the_estimates() -> None:
    report = report_of(rollouts_of(REPORT), n_samples=2, name="r", batch_id="b")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(scores_table(report))
        console.print(differences_table(compare(report, report)))
    text = capture.get()
    assert "avg@2" in text
    assert "0.833 (0.500 to 1.000)" in text
    assert "+0.000" in text
    assert notes(report, short_instances(report)) == [
        "3 rollouts without a score: sandbox_error (b.2.1, b.3.0, b.3.1)",
        "2 instances have fewer than 2 scored samples, and are left out of pass@j beyond those: math z (1), code w (0)",
    ]


PROBLEMS = [{"data_source": "math", "fields": {"i": 1}}, {"data_source": "math", "fields": {"i": 2}}]


def test_evaluation_key_depends_on_its_problems_and_settings() -> None:
    one = evaluation_request(PROBLEMS, {"n_samples": 4})
    assert one.idempotency_key == evaluation_request(PROBLEMS, {"n_samples": 4}).idempotency_key
    assert len({instance.instance_id for instance in one.instances} - {""}) == 2
    others = [
        evaluation_request(PROBLEMS, {"n_samples": 5}),
        evaluation_request(PROBLEMS[:1], {"n_samples": 4}),
        evaluation_request(PROBLEMS, {"n_samples": 4, "model": "m"}),
        evaluation_request(PROBLEMS, {"n_samples": 4}, version="7"),
        evaluation_request(PROBLEMS, {"n_samples": 4}, name="mine"),
    ]
    assert len({each.idempotency_key for each in (one, *others)}) == 6
    assert others[-1].idempotency_key == "eval:mine"


@pytest.mark.parametrize(
    ("request_", "name", "field"),
    [({"idempotency_key": "k"}, None, "idempotency_key"), ({}, "a name", "name"), ({"n_sample": 3}, None, "n_sample")],
)
def test_bad_requests_are_named(request_: dict[str, object], name: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        evaluation_request(PROBLEMS, request_, name=name)
    assert error.value.field == field

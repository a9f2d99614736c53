"""Decisions on groups: by variance, by scored samples, by age."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from farm.collecting.waves import GroupDecision, decide, stopped, too_old
from farm.records.rollout import Failure, Group, Outcome, Rollout, Stage, State
from farm.records.trajectory import NO_VERSION, Segment, token_ids

BROKEN = None


def row(n_sampled: int = 1) -> Segment:
    mask = np.full(1, n_sampled, np.uint8)
    return Segment(token_ids([1]), token_ids([2]), mask, np.zeros(1, np.float32), token_ids([NO_VERSION]))


def group(*rewards: float | None, versions: tuple[int | None, ...] = (), rows: tuple[Segment, ...] = (row(),)) -> Group:
    versions = versions or (None,) * len(rewards)
    members = tuple(
        Rollout(
            rollout_id=f"b.0.{index}",
            batch_id="b",
            group_index=0,
            sample_index=index,
            data_source="math",
            instance_id="x",
            stage=Stage.EVAL,
            state=State.FAILED if reward is BROKEN else State.COMPLETED,
            attempt=1,
            node=None,
            outcome=Outcome.SANDBOX_ERROR if reward is BROKEN else Outcome.SUBMITTED,
            reward=reward,
            failure=Failure("sandbox_error", "broke") if reward is BROKEN else None,
            n_turns=1,
            n_response_tokens=1,
            submitted_at=0.0,
            finished_at=1.0,
            finish_seq=index + 1,
            segments=rows,
            version_min=version,
            version_max=version,
        )
        for index, (reward, version) in enumerate(zip(rewards, versions, strict=True))
    )
    return Group("b.0", members)


@pytest.mark.parametrize(
    ("rewards", "least", "filtered", "decision"),
    [
        ((0.0, 1.0), 2, True, GroupDecision.ACCEPTED),
        ((0.25, 0.5), 2, True, GroupDecision.ACCEPTED),
        ((1.0, 1.0), 2, True, GroupDecision.EQUAL_REWARDS),
        ((0.0, 0.0), 2, True, GroupDecision.EQUAL_REWARDS),
        ((1.0, 1.0), 2, False, GroupDecision.ACCEPTED),
        # a broken sample is not a zero: it neither adds variance nor counts
        ((1.0, 1.0, BROKEN), 2, True, GroupDecision.EQUAL_REWARDS),
        ((1.0, 0.0, BROKEN), 2, True, GroupDecision.ACCEPTED),
        ((1.0, 0.0, BROKEN), 3, True, GroupDecision.TOO_FEW_SCORED),
        ((BROKEN, BROKEN), 1, False, GroupDecision.TOO_FEW_SCORED),
    ],
)
def test_decision_depends_on_the_rewards_of_a_group(
    rewards: tuple[float | None, ...], least: int, filtered: bool, decision: GroupDecision
) -> None:
    assert decide(group(*rewards), least, filtered=filtered) is decision


def test_samples_without_a_training_row_do_not_count() -> None:
    for rows in ((), (row(n_sampled=0),)):
        assert decide(group(0.0, 1.0, rows=rows), 1, filtered=False) is GroupDecision.TOO_FEW_SCORED


def test_rule_of_the_trainer_is_applied_last() -> None:
    def nearly_solved(each: Group) -> bool:
        return sum(rollout.reward or 0.0 for rollout in each.rollouts) >= 2

    assert decide(group(1.0, 1.0, 0.0), 3, filtered=True, accept=nearly_solved) is GroupDecision.ACCEPTED
    assert decide(group(1.0, 0.0, 0.0), 3, filtered=True, accept=nearly_solved) is GroupDecision.REFUSED
    assert decide(group(1.0, 1.0, 1.0), 3, filtered=True, accept=nearly_solved) is GroupDecision.EQUAL_REWARDS


@pytest.mark.parametrize(
    ("version", "newest", "steps_behind", "max_staleness", "old"),
    [
        (4, "5", 9, 1, False),
        (3, "5", 0, 1, True),
        (3, "5", 0, None, False),
        (5, "5", 9, 0, False),
        (4, "5", 0, 0, True),
        (None, "5", 1, 1, False),
        (None, "5", 2, 1, True),
        (3, "", 1, 1, False),
        (3, "", 2, 1, True),
        (3, "", 2, None, False),
    ],
)
def test_age_is_counted_in_versions_or_else_in_steps(
    version: int | None, newest: str, steps_behind: int, max_staleness: int | None, old: bool
) -> None:
    assert too_old(group(0.0, versions=(version,)).rollouts[0], newest, steps_behind, max_staleness) is old


def with_ends(of: Group, **ends: str) -> Group:
    """Return a group with members of another end: `s0="cancelled"`, `s2="stale"`."""
    kinds = {
        "cancelled": {"state": State.CANCELLED, "outcome": None},
        "stale": {"state": State.FAILED, "outcome": Outcome.STALE},
    }
    members = [
        replace(each, reward=None, **kinds[ends[f"s{place}"]]) if f"s{place}" in ends else each  # type: ignore[arg-type]
        for place, each in enumerate(of.rollouts)
    ]
    return Group(of.group_id, tuple(members))


@pytest.mark.parametrize(
    ("rewards", "ends", "least", "enough", "why"),
    [
        ((0.0, 1.0, 1.0), {}, 3, None, None),
        ((0.0, 1.0, 1.0), {"s0": "cancelled"}, 3, None, GroupDecision.UNFINISHED),
        # fewer may be scored, but not because they were too slow
        ((0.0, 1.0, 1.0), {"s2": "cancelled"}, 2, None, GroupDecision.UNFINISHED),
        # unless that is requested
        ((0.0, 1.0, 1.0), {"s2": "cancelled"}, 2, 2, None),
        ((0.0, 1.0, 1.0), {"s1": "cancelled", "s2": "cancelled"}, 2, 2, GroupDecision.UNFINISHED),
        ((0.0, 1.0, BROKEN), {"s1": "cancelled"}, 2, 2, GroupDecision.UNFINISHED),
        ((0.0, 1.0, BROKEN), {}, 3, None, None),
        ((0.0, 1.0, 1.0), {"s2": "stale"}, 3, None, GroupDecision.STALE),
        ((0.0, 1.0, 1.0), {"s2": "stale"}, 2, None, None),
        ((0.0, 1.0, 1.0), {"s1": "stale", "s2": "cancelled"}, 3, None, GroupDecision.UNFINISHED),
    ],
)
def test_stopped_group_is_no_evidence_about_its_instance(
    rewards: tuple[float | None, ...],
    ends: dict[str, str],
    least: int,
    enough: int | None,
    why: GroupDecision | None,
) -> None:
    assert stopped(with_ends(group(*rewards), **ends), least, enough) is why
    assert [each for each in GroupDecision if not each.is_final] == [GroupDecision.UNFINISHED, GroupDecision.STALE]

"""Trainability of a rollout is decided from its outcome, in one place."""

from __future__ import annotations

import pytest

from farm.records.rollout import POLICY_OUTCOMES, Outcome, is_too_old, trainable

OURS = set(Outcome) - POLICY_OUTCOMES


@pytest.mark.parametrize("outcome", sorted(POLICY_OUTCOMES))
def test_policy_outcome_is_trainable_once_scored(outcome: Outcome) -> None:
    assert trainable(outcome, 0.0)
    assert not trainable(outcome, None)


@pytest.mark.parametrize("outcome", sorted(OURS))
def test_farm_fault_is_never_trainable(outcome: Outcome) -> None:
    assert not trainable(outcome, 1.0)
    assert not trainable(outcome, None)


def test_running_rollout_is_not_trainable() -> None:
    assert not trainable(None, None)


@pytest.mark.parametrize(
    ("oldest", "newest", "allowed", "too_old"),
    [
        (3, "5", 2, False),
        (3, "6", 2, True),
        (5, "5", 0, False),
        (4, "5", 0, True),
        (3, "900", None, False),
        (None, "5", 0, False),
        (3, "", 0, False),
        (3, "default", 0, False),
        (6, "5", 0, False),
    ],
)
def test_too_old_weights_are_recognized(oldest: int | None, newest: str, allowed: int | None, too_old: bool) -> None:
    assert is_too_old(oldest, newest, allowed) is too_old

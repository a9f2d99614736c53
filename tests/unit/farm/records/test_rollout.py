"""Trainability of a rollout follows from its outcome, in one place."""

from __future__ import annotations

import pytest

from farm.records.rollout import POLICY_OUTCOMES, Outcome, is_too_old, trainable

OURS = set(Outcome) - POLICY_OUTCOMES


@pytest.mark.parametrize("outcome", sorted(POLICY_OUTCOMES))
def test_what_the_policy_did_trains_once_it_is_scored(outcome: Outcome) -> None:
    assert trainable(outcome, 0.0)
    assert not trainable(outcome, None)


@pytest.mark.parametrize("outcome", sorted(OURS))
def test_what_we_broke_never_trains(outcome: Outcome) -> None:
    assert not trainable(outcome, 1.0)
    assert not trainable(outcome, None)


def test_nothing_has_ended_yet() -> None:
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
def test_what_is_too_old_to_train(oldest: int | None, newest: str, allowed: int | None, too_old: bool) -> None:
    assert is_too_old(oldest, newest, allowed) is too_old

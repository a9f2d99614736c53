"""Whether a rollout may train follows from how it ended, in one place."""

from __future__ import annotations

import pytest

from farm.rollout import POLICY_OUTCOMES, Outcome, trainable

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

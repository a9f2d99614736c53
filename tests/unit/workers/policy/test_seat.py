"""Whose time a call takes: that of tries which failed, or of the one that runs."""

from __future__ import annotations

from workers.policy.seat import _Call


def test_a_first_try_has_lost_nothing_however_long_it_runs() -> None:
    call = _Call(began=0.0, since=0.0)
    assert not call.mostly_lost(0.0)
    assert not call.mostly_lost(1000.0)


def test_a_try_that_has_just_begun_does_not_make_up_for_those_that_failed() -> None:
    call = _Call(began=0.0, since=0.0)
    call.failed("busy", now=4.0)
    assert call.mostly_lost(4.0)
    call.since = 5.0
    assert call.mostly_lost(5.1)
    assert call.mostly_lost(9.9)


def test_one_that_has_run_for_longer_is_the_policys() -> None:
    call = _Call(began=0.0, since=0.0)
    call.failed("busy", now=4.0)
    call.since = 5.0
    assert not call.mostly_lost(10.0)

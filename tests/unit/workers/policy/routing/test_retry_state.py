"""Attribution of a call's time: to tries that failed, or to the one that runs."""

from __future__ import annotations

from workers.policy.routing.retry_state import Call


def test_a_first_try_has_lost_nothing_however_long_it_runs() -> None:
    call = Call(1, began=0.0)
    assert not call.is_mostly_failed(0.0)
    assert not call.is_mostly_failed(1000.0)


def test_a_try_that_has_just_begun_does_not_make_up_for_those_that_failed() -> None:
    call = Call(1, began=0.0)
    call.failed("busy", now=4.0)
    assert call.is_mostly_failed(4.0)
    call.since = 5.0
    assert call.is_mostly_failed(5.1)
    assert call.is_mostly_failed(9.9)


def test_one_that_has_run_for_longer_is_the_policys() -> None:
    call = Call(1, began=0.0)
    call.failed("busy", now=4.0)
    call.since = 5.0
    assert not call.is_mostly_failed(10.0)

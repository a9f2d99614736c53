"""Attribution of a call's time: to failed attempts, or to the running one."""

from __future__ import annotations

from workers.policy.routing.router import Call


def test_first_attempt_has_lost_no_time_however_long_it_runs() -> None:
    call = Call(1, began=0.0)
    assert not call.is_mostly_failed(0.0)
    assert not call.is_mostly_failed(1000.0)


def test_new_attempt_does_not_compensate_for_failed_ones() -> None:
    call = Call(1, began=0.0)
    call.failed("busy", now=4.0)
    assert call.is_mostly_failed(4.0)
    call.since = 5.0
    assert call.is_mostly_failed(5.1)
    assert call.is_mostly_failed(9.9)


def test_time_is_the_policys_once_the_running_attempt_took_longer() -> None:
    call = Call(1, began=0.0)
    call.failed("busy", now=4.0)
    call.since = 5.0
    assert not call.is_mostly_failed(10.0)

"""How an engine stands after calls and checks that end well or badly."""

from __future__ import annotations

import pytest

from workers.policy.health import Standing


def test_calls_of_one_rollout_alone_never_put_an_engine_out() -> None:
    standing = Standing()
    assert not any(standing.failed("r") for _ in range(100))
    assert standing.failed("another")


def test_answers_in_between_make_up_for_few_failures() -> None:
    standing = Standing()
    for name in ("r1", "r2") * 20:
        assert not standing.failed(name)
        standing.answered()
        standing.answered()


@pytest.mark.parametrize("calls", ["x.x.x.x.x", ".x.x.x.x", "....xx..xx.xx.xx"])
def test_one_that_fails_half_of_its_calls_goes_out(calls: str) -> None:
    standing = Standing()
    found = []
    for n, call in enumerate(calls):
        if call == "x":
            found.append(standing.failed(f"r{n}"))
        else:
            standing.answered()
    assert found[-1], "half of the last calls failed, and no three in a row"
    assert not any(found[:-1])


def test_it_says_how_many_of_its_calls_it_failed() -> None:
    standing = Standing()
    for n in range(3):
        standing.answered()
        standing.failed(f"r{n}")
    standing.answered()
    assert standing.failed("r9") == "4 of its last 8 calls"


def test_half_of_its_calls_may_fail_if_it_is_one_rollout_that_does() -> None:
    standing = Standing()
    for _ in range(20):
        assert not standing.failed("r")
        standing.answered()


def test_few_calls_say_little() -> None:
    standing = Standing()
    for name in ("r1", "r2", "r3"):
        assert not standing.failed(name)
        standing.answered()


def test_one_that_is_back_begins_with_a_clean_record_and_little_to_do() -> None:
    standing = Standing()
    for n in range(4):
        standing.answered()
        standing.failed(f"r{n}")
    standing.eject(0.0, "failed 4 of its last 8 calls")
    standing.bring_back(5.0)
    assert not standing.failed("r1")
    standing.answered()
    assert not standing.failed("r2")
    assert standing.share(5.0) == 0.1


def test_one_that_goes_on_failing_half_of_its_calls_is_out_for_longer_each_time() -> None:
    standing, pauses = Standing(), []
    for _ in range(4):
        for n in range(4):
            standing.answered()
            which = standing.failed(f"r{n}")
        assert which
        standing.eject(0.0, f"failed {which}")
        pauses.append(standing.out_until)
        standing.bring_back(0.0)
    assert pauses == [1, 2, 4, 8]


def test_it_is_out_after_two_failed_checks_or_one_beside_a_failed_call() -> None:
    standing = Standing()
    assert not standing.checked(False)
    assert standing.doubtful
    assert not standing.checked(True)
    assert not standing.checked(False)
    assert standing.checked(False)
    other = Standing()
    other.failed("r")
    assert other.checked(False)


def test_it_is_out_for_longer_each_time_until_it_answers_calls() -> None:
    standing, pauses = Standing(), []
    for _ in range(7):
        standing.eject(0.0, "why")
        pauses.append(standing.out_until)
        standing.bring_back(0.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert standing.n_ejected == 7
    for _ in range(8):
        standing.answered()
    standing.eject(0.0, "why")
    assert standing.out_until == 1


def test_one_that_is_back_is_trusted_little_by_little() -> None:
    standing = Standing()
    assert standing.share(0.0) == 1.0
    standing.bring_back(100.0)
    assert [round(standing.share(100.0 + age), 2) for age in (0, 5, 10, 1000)] == [0.1, 0.55, 1.0, 1.0]
    assert Standing(since=0.0).share(0.0) == 0.1


def test_many_who_find_it_busy_at_once_are_one_time() -> None:
    standing = Standing()
    for _ in range(100):
        standing.busy(0.0, None)
    assert standing.busy_until <= 0.25
    standing.busy(1.0, None)
    assert standing.busy_until <= 1.5


@pytest.mark.parametrize(("asked", "least", "most"), [(7.0, 7, 7), (0.0, 0, 0), (1e9, 120, 120), (None, 0.1, 0.3)])
def test_one_that_is_busy_is_left_alone_as_it_asks(asked: float | None, least: float, most: float) -> None:
    standing = Standing()
    standing.busy(0.0, asked)
    assert least <= standing.busy_until <= most


def test_it_may_be_out_or_busy_for_as_long_as_it_likes() -> None:
    standing = Standing()
    for now in range(0, 200_000, 100):
        standing.stay_out(float(now))
        standing.busy(float(now), None)
    assert standing.out_until <= 200_000 + 30

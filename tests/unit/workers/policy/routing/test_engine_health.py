"""Health of an engine after calls and checks that succeed or fail."""

from __future__ import annotations

import pytest

from workers.policy.routing.engine_health import EngineHealth

NEW = EngineHealth()


def after(calls: str, health: EngineHealth = NEW) -> EngineHealth:
    """Return the health after calls: each is answered (.), or fails (any other letter, which names its rollout)."""
    for call in calls:
        health = health.after_answer() if call == "." else health.after_failure(call)
    return health


def test_calls_of_one_rollout_alone_never_put_an_engine_out() -> None:
    assert not any(after("r" * n).failed_calls for n in range(1, 101))
    assert after("r" * 100 + "a").failed_calls


def test_answers_in_between_make_up_for_few_failures() -> None:
    calls = "a..b.." * 20
    assert not any(after(calls[:n]).failed_calls for n in range(1, len(calls) + 1) if calls[n - 1] != ".")


@pytest.mark.parametrize("calls", ["a.c.e.g.i", ".b.d.f.h", "....ef..ij.lm.op"])
def test_one_that_fails_half_of_its_calls_goes_out(calls: str) -> None:
    result = [after(calls[: n + 1]).failed_calls for n, call in enumerate(calls) if call != "."]
    assert result[-1], "half of the last calls failed, and no three in a row"
    assert not any(result[:-1])


def test_it_says_how_many_of_its_calls_it_failed() -> None:
    assert after(".a.b.c.z").failed_calls == "4 of its last 8 calls"


def test_half_of_its_calls_may_fail_if_it_is_one_rollout_that_does() -> None:
    assert not any(after("r." * n + "r").failed_calls for n in range(20))


def test_few_calls_say_little() -> None:
    for n in range(1, 6):
        assert not after("a.b.c."[:n]).failed_calls


def test_one_that_is_back_begins_with_a_clean_record_and_little_to_do() -> None:
    engine_health = after(".a.b.c.d").ejected(0.0, "failed 4 of its last 8 calls").readmitted(5.0)
    assert not after("a", engine_health).failed_calls
    assert not after("a.b", engine_health).failed_calls
    assert engine_health.share(5.0) == 0.1


def test_one_that_goes_on_failing_half_of_its_calls_is_out_for_longer_each_time() -> None:
    engine_health, pauses = NEW, []
    for _ in range(4):
        engine_health = after(".a.b.c.d", engine_health)
        assert engine_health.failed_calls
        engine_health = engine_health.ejected(0.0, f"failed {engine_health.failed_calls}")
        pauses.append(engine_health.ejected_until)
        engine_health = engine_health.readmitted(0.0)
    assert pauses == [1, 2, 4, 8]


def test_it_is_out_after_two_failed_checks_or_one_beside_a_failed_call() -> None:
    engine_health = NEW.after_check(False)
    assert not engine_health.fails_checks
    assert engine_health.is_suspect
    engine_health = engine_health.after_check(True)
    assert not engine_health.fails_checks
    engine_health = engine_health.after_check(False)
    assert not engine_health.fails_checks
    assert engine_health.after_check(False).fails_checks
    assert NEW.after_failure("r").after_check(False).fails_checks


def test_it_is_out_for_longer_each_time_until_it_answers_calls() -> None:
    engine_health, pauses = NEW, []
    for _ in range(7):
        engine_health = engine_health.ejected(0.0, "why")
        pauses.append(engine_health.ejected_until)
        engine_health = engine_health.readmitted(0.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert engine_health.n_ejected == 7
    assert after("." * 8, engine_health).ejected(0.0, "why").ejected_until == 1


def test_one_that_is_back_is_trusted_little_by_little() -> None:
    assert NEW.share(0.0) == 1.0
    engine_health = NEW.readmitted(100.0)
    assert [round(engine_health.share(100.0 + age), 2) for age in (0, 5, 10, 1000)] == [0.1, 0.55, 1.0, 1.0]
    assert EngineHealth(since=0.0).share(0.0) == 0.1


def test_many_who_find_it_busy_at_once_are_one_time() -> None:
    engine_health = NEW
    for _ in range(100):
        engine_health = engine_health.after_refusal(0.0, None, jitter=1.0)
    assert engine_health.busy_until <= 0.25
    assert engine_health.after_refusal(1.0, None, jitter=1.0).busy_until <= 1.5


@pytest.mark.parametrize(("asked", "least", "most"), [(7.0, 7, 7), (0.0, 0, 0), (1e9, 120, 120), (None, 0.1, 0.3)])
@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_one_that_is_busy_is_left_alone_as_it_asks(
    asked: float | None, least: float, most: float, jitter: float
) -> None:
    assert least <= NEW.after_refusal(0.0, asked, jitter).busy_until <= most


def test_it_may_be_out_or_busy_for_as_long_as_it_likes() -> None:
    engine_health = NEW
    for now in range(0, 200_000, 100):
        engine_health = engine_health.ejected_longer(float(now)).after_refusal(float(now), None, jitter=1.0)
    assert engine_health.ejected_until <= 200_000 + 30

"""Health of an engine after successful and failed calls and checks."""

from __future__ import annotations

import pytest

from workers.policy.routing.backend import EngineHealth

NEW = EngineHealth()


def after(calls: str, health: EngineHealth = NEW) -> EngineHealth:
    """Return the health after calls: each is answered (.), or fails (any other letter, which names its rollout)."""
    for call in calls:
        health = health.after_answer() if call == "." else health.after_failure(call)
    return health


def test_failures_of_one_rollout_never_eject_an_engine() -> None:
    assert not any(after("r" * n).failed_calls for n in range(1, 101))
    assert after("r" * 100 + "a").failed_calls


def test_successes_compensate_for_few_failures() -> None:
    calls = "a..b.." * 20
    assert not any(after(calls[:n]).failed_calls for n in range(1, len(calls) + 1) if calls[n - 1] != ".")


@pytest.mark.parametrize("calls", ["a.c.e.g.i", ".b.d.f.h", "....ef..ij.lm.op"])
def test_engine_that_fails_half_of_its_calls_is_ejected(calls: str) -> None:
    result = [after(calls[: n + 1]).failed_calls for n, call in enumerate(calls) if call != "."]
    assert result[-1], "half of the last calls failed, and no three in a row"
    assert not any(result[:-1])


def test_reason_has_the_number_of_failed_calls() -> None:
    assert after(".a.b.c.z").failed_calls == "4 of its last 8 calls"


def test_half_of_the_calls_may_fail_if_only_one_rollout_fails() -> None:
    assert not any(after("r." * n + "r").failed_calls for n in range(20))


def test_few_calls_are_not_enough_for_an_ejection() -> None:
    for n in range(1, 6):
        assert not after("a.b.c."[:n]).failed_calls


def test_readmitted_engine_starts_with_a_clean_record_and_a_small_share() -> None:
    engine_health = after(".a.b.c.d").ejected(0.0, "failed 4 of its last 8 calls").readmitted(5.0)
    assert not after("a", engine_health).failed_calls
    assert not after("a.b", engine_health).failed_calls
    assert engine_health.share(5.0) == 0.1


def test_engine_that_keeps_failing_is_ejected_for_longer_each_time() -> None:
    engine_health, pauses = NEW, []
    for _ in range(4):
        engine_health = after(".a.b.c.d", engine_health)
        assert engine_health.failed_calls
        engine_health = engine_health.ejected(0.0, f"failed {engine_health.failed_calls}")
        pauses.append(engine_health.ejected_until)
        engine_health = engine_health.readmitted(0.0)
    assert pauses == [1, 2, 4, 8]


def test_two_failed_checks_or_one_after_a_failed_call_eject() -> None:
    engine_health = NEW.after_check(False)
    assert not engine_health.fails_checks
    assert engine_health.is_suspect
    engine_health = engine_health.after_check(True)
    assert not engine_health.fails_checks
    engine_health = engine_health.after_check(False)
    assert not engine_health.fails_checks
    assert engine_health.after_check(False).fails_checks
    assert NEW.after_failure("r").after_check(False).fails_checks


def test_ejections_get_longer_until_the_engine_answers_calls() -> None:
    engine_health, pauses = NEW, []
    for _ in range(7):
        engine_health = engine_health.ejected(0.0, "why")
        pauses.append(engine_health.ejected_until)
        engine_health = engine_health.readmitted(0.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert engine_health.n_ejected == 7
    assert after("." * 8, engine_health).ejected(0.0, "why").ejected_until == 1


def test_share_of_a_readmitted_engine_grows_gradually() -> None:
    assert NEW.share(0.0) == 1.0
    engine_health = NEW.readmitted(100.0)
    assert [round(engine_health.share(100.0 + age), 2) for age in (0, 5, 10, 1000)] == [0.1, 0.55, 1.0, 1.0]
    assert EngineHealth(since=0.0).share(0.0) == 0.1


def test_concurrent_busy_answers_count_once() -> None:
    engine_health = NEW
    for _ in range(100):
        engine_health = engine_health.after_refusal(0.0, None, jitter=1.0)
    assert engine_health.busy_until <= 0.25
    assert engine_health.after_refusal(1.0, None, jitter=1.0).busy_until <= 1.5


@pytest.mark.parametrize(
    ("retry_after_s", "least", "most"), [(7.0, 7, 7), (0.0, 0, 0), (1e9, 120, 120), (None, 0.1, 0.3)]
)
@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_busy_engine_is_avoided_for_its_requested_time(
    retry_after_s: float | None, least: float, most: float, jitter: float
) -> None:
    assert least <= NEW.after_refusal(0.0, retry_after_s, jitter).busy_until <= most


def test_long_ejections_and_busy_times_do_not_overflow() -> None:
    engine_health = NEW
    for now in range(0, 200_000, 100):
        engine_health = engine_health.ejected_longer(float(now)).after_refusal(float(now), None, jitter=1.0)
    assert engine_health.ejected_until <= 200_000 + 30

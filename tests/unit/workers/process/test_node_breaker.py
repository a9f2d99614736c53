"""Attribution of a worker process's failures to its node."""

from __future__ import annotations

import pytest

from workers.process.node_breaker import CircuitBreaker


def tripped(breaker: CircuitBreaker, results: str, n_instances: int = 100) -> list[int]:
    """Return the results (x failed) after which the node is to be taken out of service."""
    value = []
    for n, result in enumerate(results):
        name = f"i{n % n_instances}"
        if result == "x":
            if breaker.record_failure(name, f"failure {n}"):
                value.append(n)
        else:
            breaker.record_success(name)
    return value


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ("xxxxxxx", []),
        ("xxxxxxxx", [7]),
        (".x.x.x.x", [7]),
        ("..x.x.x.x.x.x.x", []),
        ("................xxxxxxxx", [23]),
        ("................xxxxxxx", []),
        ("xxxxxxxxxxxxxxxx", [7, 15]),
    ],
)
def test_half_of_enough_results_take_a_node_out_of_service(results: str, expected: list[int]) -> None:
    assert tripped(CircuitBreaker("init"), results) == expected


def test_failures_of_few_instances_may_be_caused_by_them() -> None:
    assert tripped(CircuitBreaker("init"), "x" * 100, n_instances=2) == []
    assert tripped(CircuitBreaker("init"), "x" * 9, n_instances=3) == [7]


def test_successes_of_others_do_not_compensate_for_too_few_instances() -> None:
    breaker = CircuitBreaker("init")
    for n in range(4):
        breaker.record_success(f"well{n}")
    assert not any(breaker.record_failure("bad", "x") for _ in range(50))


def test_reason_has_the_stage_the_counts_and_the_last_message() -> None:
    breaker = CircuitBreaker("eval")
    for n in range(7):
        breaker.record_failure(f"i{n}", "first")
    assert breaker.record_failure("i8", "no space") == "eval: 8 of 8 stages failed, the last with: no space"


def test_retried_node_is_out_again_sooner_and_back_after_one_success() -> None:
    breaker = CircuitBreaker("init")
    breaker.trip("init: why")
    assert not breaker.record_failure("i1", "x")
    assert not breaker.record_failure("i1", "x"), "it may be the instance"
    assert breaker.record_failure("i2", "x")
    assert breaker.record_success("i3") == "init: why"
    assert not breaker.record_failure("i1", "x")
    assert not breaker.record_failure("i2", "x"), "one stage succeeded"
    breaker.learn("init: why", "")
    assert breaker.record_success("i4") == ""


def test_replaced_suspicion_is_dropped() -> None:
    breaker = CircuitBreaker("init")
    breaker.trip("init: why")
    breaker.learn("init: why", "init: why")
    assert breaker.record_success("i1") == "init: why"
    breaker.learn("init: an older one", "")
    assert breaker.record_success("i1") == "init: why"
    breaker.learn("init: why", "eval: another pool's")
    assert breaker.record_success("i1") == ""


def test_new_process_gets_the_suspicion_of_its_own_stage() -> None:
    assert CircuitBreaker("init", "init: why").record_success("i") == "init: why"
    assert CircuitBreaker("run", "init: why").record_success("i") == ""

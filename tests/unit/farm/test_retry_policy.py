"""Decisions by cause: one row for each outcome, and for the uncounted ends of an attempt."""

from __future__ import annotations

import pytest

from farm.errors import (
    AgentError,
    AgentMissing,
    EngineError,
    EvaluatorError,
    HandlerError,
    ImageError,
    RolloutError,
    SandboxError,
    StaleRollout,
)
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Stage, trainable
from farm.retry_policy import (
    AGENT_MISSING,
    DRAINED,
    RESTARTED,
    SUSPECTS,
    Budget,
    RetryDecision,
    cause_of,
    is_left,
    overdue_error,
    pause_s,
    retry_decision,
    retry_decision_for,
)

NEVER, FAILURES, LOSSES, RESTARTS, FREE = Budget

TABLE: dict[str, RetryDecision] = {
    **{outcome: RetryDecision(outcome, NEVER) for outcome in POLICY_OUTCOMES},
    Outcome.SANDBOX_ERROR: RetryDecision(Outcome.SANDBOX_ERROR, FAILURES, of_instance=True, of_node=True),
    Outcome.ENGINE_ERROR: RetryDecision(Outcome.ENGINE_ERROR, FAILURES),
    Outcome.EVALUATOR_ERROR: RetryDecision(Outcome.EVALUATOR_ERROR, FAILURES, of_instance=True),
    Outcome.AGENT_ERROR: RetryDecision(Outcome.AGENT_ERROR, FAILURES, of_instance=True),
    AGENT_MISSING: RetryDecision(Outcome.AGENT_ERROR, FAILURES),
    Outcome.HANDLER_ERROR: RetryDecision(Outcome.HANDLER_ERROR, FAILURES, of_instance=True),
    Outcome.LOST: RetryDecision(Outcome.LOST, LOSSES),
    Outcome.CANCELLED: RetryDecision(Outcome.CANCELLED, NEVER),
    Outcome.STALE: RetryDecision(Outcome.STALE, NEVER),
    RESTARTED: RetryDecision(Outcome.STALE, RESTARTS),
    DRAINED: RetryDecision(Outcome.LOST, FREE),
}


@pytest.mark.parametrize("cause", sorted(TABLE))
def test_each_cause_has_its_decision(cause: str) -> None:
    assert retry_decision(cause) == TABLE[cause]


def test_no_outcome_is_missing() -> None:
    assert set(TABLE) == {*Outcome, AGENT_MISSING, DRAINED, RESTARTED}


@pytest.mark.parametrize("error_type", [SandboxError, EngineError, EvaluatorError, AgentError, HandlerError])
def test_error_is_decided_by_its_type(error_type: type[RolloutError]) -> None:
    assert retry_decision_for(error_type("r1: x")) == TABLE[error_type.kind]
    assert not trainable(retry_decision_for(error_type("r1: x")).outcome, 1.0), "not even with a score"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (HandlerError("x", retryable=False), Outcome.HANDLER_ERROR),
        (ImageError("x"), Outcome.SANDBOX_ERROR),
        (StaleRollout("x", restart=False), Outcome.STALE),
    ],
)
def test_permanent_fault_is_not_retried_and_not_counted_against_the_node(error: RolloutError, outcome: Outcome) -> None:
    decision = retry_decision_for(error)
    assert (decision.outcome, decision.budget, decision.of_node) == (outcome, NEVER, False)


@pytest.mark.parametrize("retryable", [True, False])
def test_missing_agent_is_not_counted_against_the_instance(retryable: bool) -> None:
    error = AgentMissing("x", retryable=retryable)
    assert cause_of(error) not in SUSPECTS
    budget = FAILURES if retryable else NEVER
    assert retry_decision_for(error) == RetryDecision(Outcome.AGENT_ERROR, budget)


def test_transient_image_fault_is_retried() -> None:
    assert retry_decision_for(ImageError("no space", retryable=True)) == TABLE[Outcome.SANDBOX_ERROR]


def test_restart_has_its_own_budget() -> None:
    assert retry_decision_for(StaleRollout("x", restart=True)) == TABLE[RESTARTED]


@pytest.mark.parametrize("stage", Stage)
def test_hang_is_a_farm_fault_and_is_counted(stage: Stage) -> None:
    decision = retry_decision_for(overdue_error(stage, "r1: hangs"))
    assert (decision.budget, decision.of_instance) == (FAILURES, True)
    assert decision.outcome not in POLICY_OUTCOMES


@pytest.mark.parametrize(
    ("budget", "most", "n_attempts"),
    [(FAILURES, 1, 1), (FAILURES, 3, 3), (LOSSES, 0, 1), (LOSSES, 10, 11), (RESTARTS, 3, 4), (NEVER, 5, 1)],
)
def test_budget_allows_its_number_of_attempts(budget: Budget, most: int, n_attempts: int) -> None:
    n = next(n for n in range(1, 100) if not is_left(budget, n, most))
    assert n == n_attempts


def test_free_budget_is_never_spent() -> None:
    assert is_left(FREE, 1_000_000, 0)


@pytest.mark.parametrize(("budget", "first"), [(FAILURES, 1), (LOSSES, 2)])
def test_pauses_double_up_to_a_minute_with_jitter(budget: Budget, first: int) -> None:
    for n, longest_s in enumerate((2, 4, 8, 16, 32, 60, 60), start=first):
        drawn = {pause_s(budget, n, 2.0) for _ in range(100)}
        assert longest_s / 2 <= min(drawn)
        assert max(drawn) <= longest_s
        assert len(drawn) > 50, "a hundred that failed together do not return together"
    assert pause_s(budget, 100_000, 2.0) <= 60


def test_first_loss_restarts_and_free_attempts_have_no_pause() -> None:
    assert pause_s(LOSSES, 1, 2.0) == pause_s(RESTARTS, 5, 2.0) == pause_s(FREE, 0, 2.0) == 0

"""Retry policy: the budget that each cause of an attempt's end counts against, and the pause before a retry.

Workers, the dispatcher and the store all use it, so a cause has the same effect wherever it is noticed. An attempt that
the policy ended is never retried: its score counts. A failure caused by the farm is retried after a pause until its
budget is spent. A loss that nothing in the rollout caused has a separate budget, or none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from farm.errors import (
    AgentError,
    AgentMissing,
    EvaluatorError,
    RolloutError,
    SandboxError,
    StaleRollout,
    WeightsMissing,
)
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Stage

DRAINED = "drained"
"""Released by a node that is draining."""
WITHOUT_WEIGHTS = "without_weights"
"""No engine had the farm's current weights for a while; the rollout waits for one, without a node."""
AGENT_MISSING = "agent_missing"
"""The agent is not available on the node, whatever the instance."""
RESTARTED = "restarted"
"""Its weights became too old, and its batch restarts such rollouts."""

MAX_PAUSE_S = 60.0
"""The longest pause, in seconds, before a retry and before an unclaimed message is sent again."""
_DOUBLINGS = 16


class Budget(StrEnum):
    """The budget that an ended attempt counts against. `NEVER`: not retried. `UNCOUNTED`: always retried."""

    NEVER = "never"
    FAILURES = "failures"
    LOSSES = "losses"
    RESTARTS = "restarts"
    UNCOUNTED = "free"


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """`outcome` is the rollout's outcome if it is not retried.

    `of_instance`: the instance may be the cause; after enough of these all its samples stop. `of_node`: the node may be
    the cause; after enough of these it is out of service for a while. Neither is proof.
    """

    outcome: Outcome
    budget: Budget
    of_instance: bool = False
    of_node: bool = False


def _ours(outcome: Outcome, *, of_instance: bool = True, of_node: bool = False) -> RetryDecision:
    return RetryDecision(outcome, Budget.FAILURES, of_instance, of_node)


_DECISIONS: Mapping[str, RetryDecision] = {
    **{outcome: RetryDecision(outcome, Budget.NEVER) for outcome in POLICY_OUTCOMES},
    # starting sandboxes is a node's main task; a broken plug-in would take every node out of service
    Outcome.SANDBOX_ERROR: _ours(Outcome.SANDBOX_ERROR, of_node=True),
    # engines have health checks of their own
    Outcome.ENGINE_ERROR: _ours(Outcome.ENGINE_ERROR, of_instance=False),
    Outcome.EVALUATOR_ERROR: _ours(Outcome.EVALUATOR_ERROR),
    Outcome.AGENT_ERROR: _ours(Outcome.AGENT_ERROR),
    AGENT_MISSING: _ours(Outcome.AGENT_ERROR, of_instance=False),
    Outcome.HANDLER_ERROR: _ours(Outcome.HANDLER_ERROR),
    # one kill takes all samples of an instance at once, so it says nothing about the instance
    Outcome.LOST: RetryDecision(Outcome.LOST, Budget.LOSSES),
    Outcome.CANCELLED: RetryDecision(Outcome.CANCELLED, Budget.NEVER),
    Outcome.STALE: RetryDecision(Outcome.STALE, Budget.NEVER),
    RESTARTED: RetryDecision(Outcome.STALE, Budget.RESTARTS),
    DRAINED: RetryDecision(Outcome.LOST, Budget.UNCOUNTED),
    WITHOUT_WEIGHTS: RetryDecision(Outcome.ENGINE_ERROR, Budget.UNCOUNTED),
}
_OVERDUE: Mapping[Stage, type[RolloutError]] = {
    Stage.INIT: SandboxError,
    Stage.RUN: AgentError,
    Stage.EVAL: EvaluatorError,
}

CAUSES = tuple(str(cause) for cause in _DECISIONS)
"""All causes that end an attempt."""
SUSPECTS = frozenset(cause for cause, verdict in _DECISIONS.items() if verdict.of_instance)
"""The causes for which the instance may be to blame."""


def retry_decision(cause: str, retryable: bool = True) -> RetryDecision:
    """Return the decision for a cause: an `Outcome`, or one of the causes above. Raises KeyError for others.

    A failure that is not `retryable` occurs on every node, so it does not count against the node.
    """
    decision = _DECISIONS[cause]
    if retryable or decision.budget is not Budget.FAILURES:
        return decision
    return replace(decision, budget=Budget.NEVER, of_node=False)


def cause_of(error: RolloutError) -> str:
    """Return the cause of an attempt's end, for an error raised by a stage."""
    if isinstance(error, WeightsMissing):
        return WITHOUT_WEIGHTS
    return AGENT_MISSING if isinstance(error, AgentMissing) else error.kind


def retry_decision_for(error: RolloutError) -> RetryDecision:
    """Return the decision for an error raised by a stage."""
    if isinstance(error, StaleRollout) and error.restart:
        return retry_decision(RESTARTED)
    return retry_decision(cause_of(error), error.retryable)


def overdue_error(stage: Stage, message: str) -> RolloutError:
    """Return the error for a stage that exceeded its deadline. The farm or the instance may be the cause."""
    return _OVERDUE[stage](message)


def is_left(budget: Budget, n: int, most: int) -> bool:
    """Return whether another attempt follows after `n` that count against a budget of `most`."""
    if budget is Budget.UNCOUNTED:
        return True
    if budget is Budget.FAILURES:
        # `most` counts attempts, including the first
        return n < most
    return budget is not Budget.NEVER and n <= most


def pause_s(budget: Budget, n: int, retry_s: float) -> float:
    """Return the seconds to wait before the attempt after the `n`th that counts against a budget.

    The pause doubles from `retry_s` up to a minute, with random jitter over its upper half, so that rollouts that
    failed together do not retry together. The first loss costs no pause: the worker crashed, not the rollout.
    """
    n_pauses = {Budget.FAILURES: n, Budget.LOSSES: n - 1}.get(budget, 0)
    if n_pauses < 1:
        return 0.0
    longest_s: float = min(retry_s * 2 ** min(n_pauses - 1, _DOUBLINGS), MAX_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

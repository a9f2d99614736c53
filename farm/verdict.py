"""What follows from the cause that ended an attempt: how it is counted, whom it speaks against, and when it is retried.

Workers, the dispatcher and the store all ask here, so that the same cause means the same wherever it was noticed. What
the policy does is never tried again: its score counts. What we break is, with a pause, until its budget is spent. What
takes an attempt away without anybody's fault is counted by itself, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from farm.errors import AgentError, EvaluatorError, RolloutError, SandboxError, StaleRollout
from farm.rollout import POLICY_OUTCOMES, Outcome, Stage

DRAINED = "drained"
"""A node that is ending handed it back."""
RESTARTED = "restarted"
"""Newer weights had overtaken it, and its batch wants it played anew."""

_LONGEST_PAUSE_S = 60.0
_DOUBLINGS = 16


class Budget(StrEnum):
    """What an attempt that ended is counted against. `NEVER`: no other attempt follows; `FREE`: always, uncounted."""

    NEVER = "never"
    FAILURES = "failures"
    LOSSES = "losses"
    RESTARTS = "restarts"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome` is that of the rollout if no attempt follows.

    `of_instance`: the instance may be the reason; enough of these keep all its samples from being played. `of_node`:
    the node may be; enough of these take it out for a while. Neither says that it is.
    """

    outcome: Outcome
    budget: Budget
    of_instance: bool = False
    of_node: bool = False


def _ours(outcome: Outcome, *, of_instance: bool = True, of_node: bool = False) -> Verdict:
    return Verdict(outcome, Budget.FAILURES, of_instance, of_node)


_VERDICTS: Mapping[str, Verdict] = {
    **{outcome: Verdict(outcome, Budget.NEVER) for outcome in POLICY_OUTCOMES},
    # what a node is needed for above all; plug-ins break alike on every node, and would take out all of them
    Outcome.SANDBOX_ERROR: _ours(Outcome.SANDBOX_ERROR, of_node=True),
    # engines are watched, and taken out, by themselves
    Outcome.ENGINE_ERROR: _ours(Outcome.ENGINE_ERROR, of_instance=False),
    Outcome.EVALUATOR_ERROR: _ours(Outcome.EVALUATOR_ERROR),
    Outcome.AGENT_ERROR: _ours(Outcome.AGENT_ERROR),
    Outcome.HANDLER_ERROR: _ours(Outcome.HANDLER_ERROR),
    # one kill takes all samples of an instance at once, so it says nothing about the instance
    Outcome.LOST: Verdict(Outcome.LOST, Budget.LOSSES),
    Outcome.CANCELLED: Verdict(Outcome.CANCELLED, Budget.NEVER),
    Outcome.STALE: Verdict(Outcome.STALE, Budget.NEVER),
    RESTARTED: Verdict(Outcome.STALE, Budget.RESTARTS),
    DRAINED: Verdict(Outcome.LOST, Budget.FREE),
}
_OVERDUE: Mapping[Stage, type[RolloutError]] = {
    Stage.INIT: SandboxError,
    Stage.RUN: AgentError,
    Stage.EVAL: EvaluatorError,
}

SUSPECTS = frozenset(cause for cause, verdict in _VERDICTS.items() if verdict.of_instance)
"""The causes for which the instance may be the reason."""


def verdict(cause: str, retryable: bool = True) -> Verdict:
    """What follows from a cause: an `Outcome`, DRAINED or RESTARTED. Raises KeyError for another.

    What is not `retryable` fails alike everywhere, which says nothing about the node.
    """
    found = _VERDICTS[cause]
    if retryable or found.budget is not Budget.FAILURES:
        return found
    return replace(found, budget=Budget.NEVER, of_node=False)


def verdict_on(error: RolloutError) -> Verdict:
    """What follows from an error that a stage let out."""
    if isinstance(error, StaleRollout) and error.restart:
        return verdict(RESTARTED)
    return verdict(error.kind, error.retryable)


def overdue(stage: Stage, message: str) -> RolloutError:
    """The error of a stage that went on beyond its deadline: whatever hung there is ours, or the instance's."""
    return _OVERDUE[stage](message)


def is_left(budget: Budget, n: int, most: int) -> bool:
    """Whether another attempt follows the nth that counts against a budget of `most`."""
    if budget is Budget.FREE:
        return True
    if budget is Budget.FAILURES:
        # `most` counts attempts, and the first is one of them
        return n < most
    return budget is not Budget.NEVER and n <= most


def pause_s(budget: Budget, n: int, retry_s: float) -> float:
    """How long to wait before the attempt that follows the nth that counts against a budget.

    It doubles from `retry_s` up to a minute, and is drawn from the upper half, so that a hundred rollouts that failed
    together do not come back together. The first loss costs no pause: the worker died, the rollout did nothing.
    """
    n_pauses = {Budget.FAILURES: n, Budget.LOSSES: n - 1}.get(budget, 0)
    if n_pauses < 1:
        return 0.0
    longest_s: float = min(retry_s * 2 ** min(n_pauses - 1, _DOUBLINGS), _LONGEST_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

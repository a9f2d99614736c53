"""Rewards of single model calls and training rows: passes the calls to an evaluator and checks its rewards."""

from __future__ import annotations

from collections.abc import Sequence

from farm.errors import EvaluatorError
from farm.records.submission import RowRewards, row_rewards, submitted_calls
from farm.records.trajectory import ModelCall, Segment
from workers.plugins.interfaces import Score, Submission
from workers.stages.stage_job import Problem


def with_calls(
    problem: Problem, submission: Submission, calls: Sequence[ModelCall], rows: Sequence[Segment]
) -> Submission:
    """Return the submission, with the model calls if its evaluator wants them."""
    if not problem.handler.scores_calls:
        return submission
    return submission.model_copy(update={"calls": submitted_calls(calls, rows)})


def rewards_of_rows(rollout_id: str, submission: Submission, score: Score, evaluator: str) -> RowRewards | None:
    """Return the rewards of single rows and turns, None if there are none. Raises EvaluatorError for unknown rows."""
    try:
        return row_rewards(submission.calls, score.call_rewards, score.row_rewards)
    except ValueError as error:
        why = "" if submission.calls else ": evaluators see the calls of handlers with scores_calls = True"
        raise EvaluatorError(f"{rollout_id}: evaluator {evaluator} rewards an unknown row: {error}{why}") from None

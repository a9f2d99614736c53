"""The result object of `/process`, from the stored rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farm.api.prorl.requests import SamplingMix
from farm.api.prorl.wire_messages import conversation
from farm.records.rollout import Outcome, Rollout, Stage, State, Timing
from farm.records.trajectory import ModelCall

_RESOLVED = 0.99
_FINISHED = (Outcome.SUBMITTED, Outcome.ANSWERED)
_ERRORS = {
    Outcome.MAX_TURNS: "agent reached the maximum iteration",
    Outcome.MAX_TOKENS: "length: the limit of sampled tokens was reached",
    Outcome.CONTEXT_FULL: "length: the context window is full",
    Outcome.INVALID_ACTION: "tool_call: the policy's calls could not be read",
    Outcome.REPEATING: "AgentStuckInLoopError: Agent got stuck in a loop",
    Outcome.DEADLINE: "timeout: the time limit of the run was reached",
    Outcome.STALE: "its weights were too old",
    Outcome.CANCELLED: "cancelled",
}


def result_of(
    ids: dict[str, Any],
    sampling: SamplingMix,
    rollout: Rollout,
    calls: Sequence[ModelCall],
    timings: Sequence[Timing],
    submission: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the result of an ended rollout; `ids` are those of its instance.

    One that the farm broke, or that was cancelled, has no messages, so its clients know that there is nothing to train
    on.
    """
    whole = rollout.state is State.COMPLETED
    with_tokens = sampling.token_level_generation is not False
    transcript = conversation(calls if whole else (), with_tokens, sampling.ensure_thinking_end_properly)
    error = _error(rollout)
    critical = _critical(rollout)
    times = _times(rollout, timings)
    result = {
        "instance_id": ids.get("instance_id", rollout.instance_id),
        "trajectory_id": ids.get("trajectory_id"),
        "resolved": rollout.reward is not None and rollout.reward > _RESOLVED,
        "reward": rollout.reward,
        "critical_error": critical,
        "success": error is None,
        "error": error,
        "finish": rollout.outcome in _FINISHED,
        "git_patch": (submission or {}).get("files", {}).get("model.patch"),
        "messages": transcript.messages,
        "tools": transcript.tools,
        "end_properly": transcript.ends_properly and rollout.outcome is not Outcome.INVALID_ACTION,
        "filter": _filter(rollout, critical, error),
        "timing": times | {"timeout_triggered": rollout.outcome is Outcome.DEADLINE},
        "rollout_id": rollout.rollout_id,
    }
    if rollout.reward is not None:
        # one of its clients reads this, and takes a missing value as 0.0
        result["score"] = rollout.reward
    return result | ({"traceback": error} if rollout.state is State.FAILED else {})


def _error(rollout: Rollout) -> str | None:
    if rollout.failure is not None:
        return f"{rollout.failure.kind}: {rollout.failure.message}"
    if rollout.outcome in _FINISHED:
        return None
    return "it has not ended" if rollout.outcome is None else _ERRORS.get(rollout.outcome, rollout.outcome.value)


def _critical(rollout: Rollout) -> str | None:
    """Return the stage in which it broke; `timeout` if the run exceeded its time limit."""
    if rollout.state is not State.COMPLETED:
        return rollout.stage.value
    return "timeout" if rollout.outcome is Outcome.DEADLINE else None


def _filter(rollout: Rollout, critical: str | None, error: str | None) -> bool:
    """Return whether it should not train; a malformed call does train, as the mistake that it is."""
    if critical is not None:
        return True
    return error is not None and rollout.outcome is not Outcome.INVALID_ACTION


def _times(rollout: Rollout, timings: Sequence[Timing]) -> dict[str, float]:
    """Return the seconds of the last attempt's stages, and all other time since the submit."""
    last = max((timing.attempt for timing in timings), default=0)
    spent = {
        stage: sum(timing.work_s or 0.0 for timing in timings if timing.stage is stage and timing.attempt == last)
        for stage in Stage
    }
    counted = sum(spent.values())
    ended_at = rollout.finished_at or rollout.submitted_at
    return {
        "init_time": spent[Stage.INIT],
        "run_time": spent[Stage.RUN],
        "eval_time": spent[Stage.EVAL],
        "others_time": max(0.0, ended_at - rollout.submitted_at - counted),
        "counted_elapsed": counted,
    }

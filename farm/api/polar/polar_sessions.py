"""Sessions and their results: rollouts, with traces of token ids, log-probabilities and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farm.records.rollout import Outcome, Rollout, Stage, State, Timing
from farm.records.trajectory import Message, ModelCall, Segment, ToolSchema, calls_of_segments, segments, tools_by_call

Value = dict[str, Any]


def session_status(rollout: Rollout) -> str:
    """Return the status of a session: COMPLETED if it was scored, TIMEOUT if its policy ran out of time."""
    if rollout.finished_at is None:
        if rollout.stage is Stage.INIT:
            return "REGISTERED" if rollout.state is State.QUEUED else "INITIALIZING"
        if rollout.stage is Stage.RUN:
            return "READY" if rollout.state is State.QUEUED else "RUNNING"
        return "POST_RUN" if rollout.state is State.QUEUED else "EVALUATING"
    if not rollout.trainable:
        return "ERROR"
    return "TIMEOUT" if rollout.outcome is Outcome.DEADLINE else "COMPLETED"


def session_result(
    task_id: str, builder: str, rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing]
) -> Value:
    """Return the result of an ended session.

    One that the farm broke, or that was cancelled, has no traces or reward.
    """
    status = session_status(rollout)
    error = None
    tools = tools_by_call(calls)
    if status == "ERROR":
        reason = f": {rollout.failure.message}" if rollout.failure is not None else ""
        error = f"rollout {rollout.rollout_id} ended as {rollout.outcome}{reason}"
        traces: list[Value] = []
    elif builder == "prefix_merging":
        traces = [_merged(row, row_calls, rollout, tools[row_calls[0].index]) for row, row_calls in _rows(calls)]
    else:
        traces = [_of_call(call, rollout, tools[call.index]) for call in calls]
    metadata = {"record_count": len(calls), "outcome": str(rollout.outcome), "outcome_reward": rollout.reward}
    return {
        "session_id": rollout.rollout_id,
        "task_id": task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": metadata, "traces": traces, "error": error},
        "timing": _timing(rollout, timings),
        "node_id": rollout.node,
        "error": error,
        "metadata": {"sample_index": rollout.sample_index, "instance_id": rollout.instance_id},
    }


def _rows(calls: Sequence[ModelCall]) -> Sequence[tuple[Segment, Sequence[ModelCall]]]:
    return list(zip(segments(calls), calls_of_segments(calls), strict=True))


def _merged(row: Segment, calls: Sequence[ModelCall], rollout: Rollout, tools: list[ToolSchema]) -> Value:
    """Return a training row as a trace; one that may not train is masked."""
    between: list[Message] = []
    for number, call in enumerate(calls):
        between += [*(call.messages if number else []), call.response, *call.observations]
    mask = row.response_mask.tolist() if row.trainable else [0] * len(row.response_ids)
    return {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "loss_mask": mask,
        "response_logprobs": row.response_logprobs.tolist(),
        "prompt_messages": calls[0].messages,
        "response_messages": between,
        "tools": tools or None,
        **_end(calls[-1], rollout, row.untrainable),
    }


def _of_call(call: ModelCall, rollout: Rollout, tools: list[ToolSchema]) -> Value:
    """Return a model call as a trace, without tokens if not all are known."""
    tokens: Value = {"prompt_ids": [], "response_ids": [], "loss_mask": [], "response_logprobs": None}
    differs = "an engine saw another token than it was sent" if call.mismatch is not None else ""
    if call.token_exact:
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        tokens = {
            "prompt_ids": call.prompt_ids.tolist(),
            "response_ids": call.response_ids.tolist(),
            "loss_mask": [0 if differs else 1] * len(call.response_ids),
            "response_logprobs": call.response_logprobs.tolist(),
        }
    messages = {"prompt_messages": call.messages, "response_messages": [call.response]}
    return {**tokens, **messages, "tools": tools or None, **_end(call, rollout, differs)}


def _end(call: ModelCall, rollout: Rollout, untrainable: str) -> Value:
    metadata = {"policy_version": call.policy_version, **({"masked": untrainable} if untrainable else {})}
    return {"finish_reason": call.finish_reason, "reward": rollout.reward, "metadata": metadata}


def _timing(rollout: Rollout, timings: Sequence[Timing]) -> dict[str, float]:
    """Return the milliseconds of the last attempt's stages."""
    last = max((timing.attempt for timing in timings), default=0)
    names = {Stage.INIT: ("register_to_init_queue_ms", "init_ms"), Stage.RUN: ("ready_queue_ms", "run_ms")}
    names[Stage.EVAL] = ("postrun_queue_ms", "postrun_ms")
    times = {"e2e_ms": 1000 * ((rollout.finished_at or rollout.submitted_at) - rollout.submitted_at)}
    for timing in timings:
        if timing.attempt == last:
            queued, worked = names[timing.stage]
            times |= {queued: 1000 * (timing.queued_s or 0.0), worked: 1000 * (timing.work_s or 0.0)}
    return times

"""A rollout as one line of JSON: messages, training rows, scores and times.

Lines are strict JSON in ASCII: values without a JSON number (NaN, infinity) are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from farm.records.rollout import Reward, Rollout, Timing
from farm.records.scoring.annotation import Annotation
from farm.records.trajectory import ModelCall, Segment, all_tools


def rollout_line(
    rollout: Rollout,
    calls: Sequence[ModelCall],
    timings: Sequence[Timing],
    rewards: Sequence[Reward],
    annotations: Sequence[Annotation] = (),
) -> bytes:
    """Return an ended rollout as one line: messages, training rows, scores and times."""
    return written(rollout_values(rollout, calls, timings, rewards, annotations))


def written(values: dict[str, Any]) -> bytes:
    """Return the values of a rollout as a line."""
    return json.dumps(_plain(values), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def rollout_values(
    rollout: Rollout,
    calls: Sequence[ModelCall],
    timings: Sequence[Timing],
    rewards: Sequence[Reward],
    annotations: Sequence[Annotation] = (),
) -> dict[str, Any]:
    """Return the values of a line; arrays stay NumPy arrays."""
    failure = rollout.failure
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "data_source": rollout.data_source,
        "instance_id": rollout.instance_id,
        "state": rollout.state,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "trainable": rollout.trainable,
        "failure": None if failure is None else {"kind": failure.kind, "message": failure.message},
        "attempt": rollout.attempt,
        "n_turns": rollout.n_turns,
        "n_response_tokens": rollout.n_response_tokens,
        "versions": [rollout.version_min, rollout.version_max],
        "submitted_at": rollout.submitted_at,
        "finished_at": rollout.finished_at,
        "messages": [message for call in calls for message in (*call.messages, call.response, *call.observations)],
        "tools": all_tools(calls),
        "rewards": [
            {"value": each.value, "details": each.details, "evaluator": each.evaluator, "created_at": each.created_at}
            for each in rewards
        ],
        "timings": [
            {
                "attempt": each.attempt,
                "stage": each.stage,
                "node": each.node,
                "queued_s": each.queued_s,
                "work_s": each.work_s,
                "result": each.result,
                "failure": None if each.failure is None else each.failure.message,
            }
            for each in timings
        ],
        "segments": [_segment(segment) for segment in rollout.segments],
        "annotations": [
            {name: getattr(each, name) for name in ("name", "producer", "step", "value", "row", "tokens", "created_at")}
            for each in annotations
        ],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    row = {name: getattr(segment, name) for name in segment.__slots__}
    return row | {"trainable": segment.trainable}


def _plain(value: Any) -> Any:
    """Return a value for JSON: arrays as lists, NaN and infinity as null."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

"""verl's rows: the fields of its `AgentLoopOutput`. The agent loop manager is `farm.adapters.verl_agent_loops`.

verl's V0 trainer takes one row for each sample, its V1 trainer one or several. Both sum the reward over a row's tokens;
the reward stands on the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import single_rows
from farm.adapters.stop_reasons import reason_table
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment

STOP_REASONS = reason_table(ended="completed", cut="length", broken="error", aborted="aborted")
"""verl's words for the end of a call; a row has no field for it, so it is `farm_stop_reason` of the extra fields."""


class VerlAdapter:
    """Rows as keyword arguments of verl's `AgentLoopOutput`, one for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that may train; the manager has placeholders for the others, where needed."""
        return [
            output_fields(rollout, segment, float(rollout.reward or 0.0))
            for rollout, segment in single_rows(rollouts, min_version)
        ]

    def read(self, rows: Sequence[Mapping[str, Any]], /) -> list[TrainingRow]:
        """Return the rows as plain values."""
        return [
            TrainingRow(
                tuple(row["prompt_ids"]),
                tuple(row["response_ids"]),
                tuple(row["response_mask"]),
                tuple(row["response_logprobs"]),
                row["reward_score"],
                rollout_id=row["extra_fields"]["farm_rollout_id"],
            )
            for row in rows
        ]


rows = VerlAdapter()


def output_fields(rollout: Rollout, segment: Segment, reward: float) -> dict[str, Any]:
    """Return the fields of an `AgentLoopOutput`; its metrics are verl's own zeros, as no call of verl's was made.

    `min_global_steps` and `max_global_steps`, by which verl drops what is too old, are the versions of the row, where
    its weights have numbers. They are those of verl's steps if the engines' weights are named by them.
    """
    oldest, newest = segment.version_span
    return {
        "prompt_ids": segment.prompt_ids.tolist(),
        "response_ids": segment.response_ids.tolist(),
        "response_mask": segment.response_mask.tolist(),
        "response_logprobs": segment.response_logprobs.tolist(),
        "reward_score": reward,
        "num_turns": rollout.n_turns,
        "metrics": {},
        "extra_fields": {
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": None if oldest == NO_VERSION else oldest,
            "max_global_steps": None if newest == NO_VERSION else newest,
            "reward_extra_info": {"acc": reward},
            "farm_rollout_id": rollout.rollout_id,
            "farm_outcome": str(rollout.outcome or ""),
            "farm_stop_reason": "aborted" if rollout.outcome is None else STOP_REASONS[rollout.outcome],
        },
    }

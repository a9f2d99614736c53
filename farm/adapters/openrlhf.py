"""OpenRLHF's rows, as returned by its `AgentExecutorBase.execute`. The executor is `farm.adapters.openrlhf_executor`.

OpenRLHF divides by the number of a row's trained tokens for its logs and its KL coefficient, so a row without any makes
NaN. The placeholder of a failed rollout therefore trains one token, with the neutral reward: its advantage is 0 under
every estimator that subtracts the mean of the group (`group_norm`, `dr_grpo`, `rloo`, `reinforce_baseline` before its
normalization). Under `gae` and `reinforce`, which have no such mean, that token trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.adapters.single_row import StepRow, reason_table, single_rows
from farm.records.rollout import Rollout
from farm.records.trajectory import Segment

TRUNCATED = reason_table(ended=False, cut=True, broken=False, aborted=False)
"""OpenRLHF only distinguishes whether the row was cut short (`truncated`), for its length penalty."""
MAPPED = frozenset(
    {
        *("rollout.temperature", "rollout.top_p", "rollout.max_new_tokens", "rollout.n_samples_per_prompt"),
        *("eval.temperature", "eval.n_samples_per_prompt", "data.max_len", "data.label_key"),
    }
)
"""OpenRLHF's options that the farm's rollouts follow: its executor gets them as the arguments of a call."""
REFUSED = {"data.max_images_per_prompt": "the farm's rollouts are text only"}
"""Options that must keep their default, with the reason."""


class OpenRLHFAdapter:
    """Rows as `execute` returns them, without prompt and label: a mapping for each rollout that may train."""

    rows_per_rollout: RowsPerRollout = "one"

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that may train; the executor adds placeholders for the others."""
        return [
            response_fields(rollout, segment, float(rollout.reward or 0.0))
            for rollout, segment in single_rows(rollouts, min_version)
        ]

    def read(self, rows: Sequence[Mapping[str, Any]], /) -> list[TrainingRow]:
        """Return the rows as plain values; the prompt is in the response, as the format does not show its end."""
        read_rows = []
        for row in rows:
            mask = np.zeros(len(row["observation_tokens"]), np.uint8)
            for start, end in row["action_ranges"]:
                mask[start:end] = 1
            ids, logprobs = tuple(row["observation_tokens"]), tuple(row["rollout_log_probs"])
            read_rows.append(TrainingRow((), ids, tuple(mask.tolist()), logprobs, row["reward"]))
        return read_rows


rows = OpenRLHFAdapter()


def response_fields(rollout: Rollout, segment: Segment, reward: float) -> dict[str, Any]:
    """Return the response fields that a rollout determines."""
    n_prompt = len(segment.prompt_ids)
    return {
        "observation_tokens": [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()],
        "action_ranges": _ranges(segment, n_prompt),
        "rollout_log_probs": [0.0] * n_prompt + segment.response_logprobs.tolist(),
        "reward": reward,
        "scores": reward,
        "truncated": rollout.outcome is not None and TRUNCATED[rollout.outcome],
        "extra_logs": {
            "farm_n_turns": float(rollout.n_turns),
            "farm_scored": float(rollout.trainable),
            "farm_version_min": float(segment.version_span[0]),
        },
    }


def placeholder_fields(row: StepRow) -> dict[str, Any]:
    """Return the fields of a placeholder row: one trained token without an advantage; see the module.

    If nothing in the group was scored, the score is out of every range of `dynamic_filtering`, which drops the group.
    """
    fields = response_fields(row.rollout, row.segments[0].cut(1), row.reward)
    n_prompt = len(row.segments[0].prompt_ids)
    if row.group_unscored:
        fields["scores"] = -math.inf
    return fields | {"action_ranges": [(n_prompt, n_prompt + 1)], "truncated": False}


def _ranges(segment: Segment, offset: int) -> list[tuple[int, int]]:
    """Return the sampled ranges as [start, end), counted from the start of the prompt."""
    ranges, position = [], offset
    for sampled, stretch in groupby(segment.response_mask.tolist()):
        n = sum(1 for _ in stretch)
        if sampled:
            ranges.append((position, position + n))
        position += n
    return ranges

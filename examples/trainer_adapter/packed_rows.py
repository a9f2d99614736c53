"""Training rows concatenated in flat arrays, without padding, for attention over variable-length sequences.

Row k is `[row_starts[k], row_starts[k + 1])` of every array of tokens; FlashAttention calls this `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farm.adapters.protocol import RowsPerRollout, TrainingRow, training_rows
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION


@dataclass(frozen=True, slots=True)
class PackedRows:
    """`n` rows of `t` tokens together, prompts and responses alike.

    row_starts       int32 [n + 1], from 0 to t
    input_ids        int32 [t]
    position_ids     int32 [t], counted from 0 in each row
    loss_mask        uint8 [t], 1 exactly where the policy sampled the token
    old_logprobs     float32 [t], 0.0 where loss_mask is 0
    policy_versions  int32 [t], -1 where loss_mask is 0 or the engine does not say
    rewards          float32 [n]
    """

    row_starts: NDArray[np.int32]
    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    old_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    rewards: NDArray[np.float32]


class PackedAdapter:
    """Packed rows of rollouts; the entry point names its instance `packed`."""

    rows_per_rollout: RowsPerRollout = "every"

    def __call__(
        self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None, max_row_tokens: int | None = None
    ) -> PackedRows:
        """Return the rows of these rollouts; rows longer than `max_row_tokens` are left out."""
        rows = [
            (rollout, segment)
            for rollout, segment in training_rows(rollouts, min_version)
            if max_row_tokens is None or len(segment.prompt_ids) + len(segment.response_ids) <= max_row_tokens
        ]
        segments = [segment for _, segment in rows]
        lengths = [len(segment.prompt_ids) + len(segment.response_ids) for segment in segments]
        prompts = [np.zeros(len(segment.prompt_ids), np.int32) for segment in segments]
        unknown = [prompt + NO_VERSION for prompt in prompts]
        return PackedRows(
            row_starts=np.cumsum([0, *lengths]).astype(np.int32),
            input_ids=_joined([s.prompt_ids for s in segments], [s.response_ids for s in segments], np.int32),
            position_ids=np.concatenate([np.empty(0), *map(np.arange, lengths)]).astype(np.int32),
            loss_mask=_joined(prompts, [s.response_mask for s in segments], np.uint8),
            old_logprobs=_joined(prompts, [s.response_logprobs for s in segments], np.float32),
            policy_versions=_joined(unknown, [s.policy_versions for s in segments], np.int32),
            rewards=np.array([rollout.reward for rollout, _ in rows], np.float32),
        )

    def read(self, rows: PackedRows, /) -> list[TrainingRow]:
        """Return each row separately; the response includes the prompt, as the format does not store where it ends."""
        bounds = zip(rows.row_starts[:-1], rows.row_starts[1:], rows.rewards, strict=True)
        return [
            TrainingRow(
                prompt_ids=(),
                response_ids=tuple(rows.input_ids[start:end].tolist()),
                response_mask=tuple(rows.loss_mask[start:end].tolist()),
                logprobs=tuple(rows.old_logprobs[start:end].tolist()),
                reward=float(reward),
                versions=tuple(rows.policy_versions[start:end].tolist()),
            )
            for start, end, reward in bounds
        ]


packed = PackedAdapter()


def _joined(prompts: Sequence[NDArray[Any]], responses: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Return the prompt and response of each row in turn, as one array."""
    parts = [part for row in zip(prompts, responses, strict=True) for part in row]
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)

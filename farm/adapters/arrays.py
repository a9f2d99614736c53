"""A batch as padded arrays: what every trainer's own adapter starts from.

One row per segment, so a rollout whose history branched has several rows with one reward. Prompts are padded on the
left, responses on the right, so that column 0 of the response is where sampling began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from farm.rollout import Rollout
from farm.trajectory import NO_VERSION, Segment

if TYPE_CHECKING:
    from farm.client import Farm


@dataclass(frozen=True, slots=True)
class Arrays:
    """`n` rows; P and R are the longest prompt and response.

    prompt_ids, prompt_mask            int32, uint8 [n, P], left-padded; mask 1 where there is a token
    response_ids, attention_mask       int32, uint8 [n, R], right-padded; mask 1 where there is a token
    response_mask                      uint8 [n, R], 1 exactly where the policy sampled the token
    response_logprobs                  float32 [n, R], 0.0 where response_mask is 0
    policy_versions                    int32 [n, R], -1 where response_mask is 0 or the engine does not say
    rewards                            float32 [n], NaN where the rollout has none
    trainable                          bool [n]; a segment that is not exact never is, whatever its rollout
    group_index, sample_index          int32 [n]
    group_ids, rollout_ids, outcomes   str [n]
    """

    prompt_ids: NDArray[np.int32]
    prompt_mask: NDArray[np.uint8]
    response_ids: NDArray[np.int32]
    attention_mask: NDArray[np.uint8]
    response_mask: NDArray[np.uint8]
    response_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    rewards: NDArray[np.float32]
    trainable: NDArray[np.bool_]
    group_index: NDArray[np.int32]
    sample_index: NDArray[np.int32]
    group_ids: NDArray[np.str_]
    rollout_ids: NDArray[np.str_]
    outcomes: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.rewards)

    def as_dict(self) -> dict[str, NDArray[Any]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_torch(self) -> dict[str, Any]:
        """The numeric arrays as torch tensors, the others as lists. Needs torch, which the farm does not install."""
        import torch  # type: ignore[import-not-found, unused-ignore]

        return {
            name: values.tolist() if values.dtype.kind == "U" else torch.from_numpy(values)
            for name, values in self.as_dict().items()
        }


def batch_arrays(
    farm: Farm,
    batch_id: str,
    *,
    whole_groups: bool = False,
    trainable_only: bool = True,
    pad_id: int = 0,
    timeout_s: float | None = None,
) -> Arrays:
    """Wait for a batch and give its rows; see `arrays`. Raises NotFound, TimeoutError."""
    return arrays(
        farm.collect(batch_id, timeout_s), whole_groups=whole_groups, trainable_only=trainable_only, pad_id=pad_id
    )


def arrays(
    rollouts: Sequence[Rollout], *, whole_groups: bool = False, trainable_only: bool = True, pad_id: int = 0
) -> Arrays:
    """Rows of the rollouts that have training rows, in their order.

    `trainable_only` leaves out what broke, as it has no reward, and segments that may not train, as an engine saw other
    tokens than it was sent or nothing in them was sampled; a rollout with no other segment is left out. `whole_groups`
    leaves out every group of which a member is left out, for estimators that compare all samples of an instance.
    """
    kept = [(rollout, found) for rollout in rollouts if (found := _segments(rollout, trainable_only))]
    if whole_groups:
        asked = Counter(rollout.group_id for rollout in rollouts)
        members = Counter(rollout.group_id for rollout, _ in kept)
        kept = [(rollout, found) for rollout, found in kept if members[rollout.group_id] == asked[rollout.group_id]]
    rows = [(rollout, segment) for rollout, found in kept for segment in found]
    segments = [segment for _, segment in rows]
    return Arrays(
        prompt_ids=_padded((s.prompt_ids for s in segments), np.int32, pad_id, left=True),
        prompt_mask=_padded((np.ones(len(s.prompt_ids), np.uint8) for s in segments), np.uint8, 0, left=True),
        response_ids=_padded((s.response_ids for s in segments), np.int32, pad_id),
        attention_mask=_padded((np.ones(len(s.response_ids), np.uint8) for s in segments), np.uint8, 0),
        response_mask=_padded((s.response_mask for s in segments), np.uint8, 0),
        response_logprobs=_padded((s.response_logprobs for s in segments), np.float32, 0.0),
        policy_versions=_padded((s.policy_versions for s in segments), np.int32, NO_VERSION),
        rewards=_column(rows, lambda r: np.nan if r.reward is None else r.reward, np.float32),
        trainable=np.array([rollout.trainable and segment.trainable for rollout, segment in rows], np.bool_),
        group_index=_column(rows, lambda r: r.group_index, np.int32),
        sample_index=_column(rows, lambda r: r.sample_index, np.int32),
        group_ids=_column(rows, lambda r: r.group_id, np.str_),
        rollout_ids=_column(rows, lambda r: r.rollout_id, np.str_),
        outcomes=_column(rows, lambda r: str(r.outcome or ""), np.str_),
    )


def _segments(rollout: Rollout, trainable_only: bool) -> list[Segment]:
    if not trainable_only:
        return list(rollout.segments)
    return [segment for segment in rollout.segments if rollout.trainable and segment.trainable]


def _padded(values: Iterable[NDArray[Any]], dtype: Any, pad: float, left: bool = False) -> NDArray[Any]:
    rows = list(values)
    width = max((len(row) for row in rows), default=0)
    padded = np.full((len(rows), width), pad, dtype)
    for index, row in enumerate(rows):
        if left:
            padded[index, width - len(row) :] = row
        else:
            padded[index, : len(row)] = row
    return padded


def _column(rows: Sequence[tuple[Rollout, Segment]], value: Callable[[Rollout], Any], dtype: Any) -> NDArray[Any]:
    return np.array([value(rollout) for rollout, _ in rows], dtype)

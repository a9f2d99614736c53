"""The adapter `arrays`: a batch as padded arrays, from which a trainer can make its own rows.

One row per segment, so a rollout with a branched history has several rows with one reward. Prompts are padded on the
left, responses on the right, so that sampling starts at column 0 of the response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farm.adapters.protocol import RowsPerRollout, TrainingRow
from farm.records.experts.routed_experts import ExpertIds
from farm.records.rollout import Rollout
from farm.records.trajectory import NO_VERSION, Segment


@dataclass(frozen=True, slots=True)
class Arrays:
    """`n` rows; P and R are the longest prompt and response.

    prompt_ids, prompt_mask            int32, uint8 [n, P], left-padded; mask 1 where there is a token
    response_ids, attention_mask       int32, uint8 [n, R], right-padded; mask 1 where there is a token
    response_mask                      uint8 [n, R], 1 exactly where the policy sampled the token
    response_logprobs                  float32 [n, R], 0.0 where response_mask is 0
    policy_versions                    int32 [n, R], -1 where response_mask is 0 or the version is unknown
    truncated                          bool [n]; the response was longer than the limit, and is cut
    rewards                            float32 [n], NaN if the rollout has none
    row_rewards                        float32 [n], the row's own reward if the evaluator gave one, else `rewards`
    turn_rewards                       float32 [n, R], the reward of a turn at its last token; else 0.0
    routed_experts                     uint8 or uint16 [n, P + R, layers, top_k], of prompts and responses with the
                                       same padding; 0 where unknown; [n, 0, 0, 0] if no row has any
    experts_known                      uint8 [n, P + R], 1 where known; always 0 at the last sampled token
    trainable                          bool [n]; False for segments that are not exact, whatever their rollout
    rollout_index                      int32 [n], counted from 0; rows of one rollout share it and the reward
    group_index, sample_index          int32 [n]
    n_turns                            int32 [n], of the rollout
    version_min, version_max           int32 [n], the oldest and newest weights of the row, -1 if unknown
    finished_at                        float64 [n], seconds since the epoch; NaN if it has not ended
    group_ids, rollout_ids,
    instance_ids, outcomes             str [n]
    images                             str [n, I], the digests of the row's images in order; empty beyond the last
    """

    prompt_ids: NDArray[np.int32]
    prompt_mask: NDArray[np.uint8]
    response_ids: NDArray[np.int32]
    attention_mask: NDArray[np.uint8]
    response_mask: NDArray[np.uint8]
    response_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    rewards: NDArray[np.float32]
    row_rewards: NDArray[np.float32]
    turn_rewards: NDArray[np.float32]
    routed_experts: ExpertIds
    experts_known: NDArray[np.uint8]
    trainable: NDArray[np.bool_]
    rollout_index: NDArray[np.int32]
    group_index: NDArray[np.int32]
    sample_index: NDArray[np.int32]
    n_turns: NDArray[np.int32]
    version_min: NDArray[np.int32]
    version_max: NDArray[np.int32]
    finished_at: NDArray[np.float64]
    group_ids: NDArray[np.str_]
    rollout_ids: NDArray[np.str_]
    instance_ids: NDArray[np.str_]
    outcomes: NDArray[np.str_]
    images: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.rewards)

    def as_dict(self) -> dict[str, NDArray[Any]]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def group_advantages(self, *, scaled: bool = True, epsilon: float = 1e-6) -> NDArray[np.float32]:
        """Return each row's reward minus the mean of its group, float32 [n]; NaN without a reward.

        Means and deviations are over rollouts, so that one with several rows counts once; every row of a rollout has
        its advantage. `scaled` divides by the group's standard deviation plus `epsilon`, as in GRPO (arXiv:2402.03300,
        section 4.1.2); without it the advantages are Dr. GRPO's (arXiv:2503.20783).
        """
        _, first = np.unique(self.rollout_index, return_index=True)
        of_rollouts = self.rewards[first].astype(np.float64)
        groups = self.group_ids[first]
        advantages = np.full(len(first), np.nan)
        for group in np.unique(groups):
            in_group = groups == group
            scored = of_rollouts[in_group & ~np.isnan(of_rollouts)]
            if len(scored):
                scale = scored.std() + epsilon if scaled else 1.0
                advantages[in_group] = (of_rollouts[in_group] - scored.mean()) / scale
        return advantages[np.searchsorted(self.rollout_index[first], self.rollout_index)].astype(np.float32)

    def as_torch(self) -> dict[str, Any]:
        """Return numeric arrays as torch tensors, the others as lists. Needs torch, which the farm does not install."""
        import torch  # type: ignore[import-not-found, unused-ignore]

        return {
            name: values.tolist() if values.dtype.kind == "U" else torch.from_numpy(values)
            for name, values in self.as_dict().items()
        }


class ArraysAdapter:
    """Padded arrays of rollouts; `arrays` is its instance."""

    rows_per_rollout: RowsPerRollout = "every"

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        /,
        *,
        whole_groups: bool = False,
        trainable_only: bool = True,
        pad_id: int = 0,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        min_version: int | None = None,
    ) -> Arrays:
        """Return rows of the rollouts that have training rows, in their order.

        `trainable_only` leaves out failed rollouts, which have no reward, and segments that may not train: an engine
        saw other tokens than it was sent, or no token was sampled. `whole_groups` leaves out every group with a member
        left out, for estimators that compare all samples of an instance.

        P and R are the lengths of the longest row, which may be far longer than the rest. So rows with a prompt longer
        than `max_prompt_tokens` are left out (a cut prompt would be a different one), and responses are cut to
        `max_response_tokens`. `min_version` leaves out rows with a token that was sampled by older or unknown weights.
        """
        wanted = _Wanted(trainable_only, max_prompt_tokens, max_response_tokens, min_version)
        kept = [(rollout, value) for rollout in rollouts if (value := wanted.segments(rollout))]
        if whole_groups:
            n_all = Counter(rollout.group_id for rollout in rollouts)
            n_kept = Counter(rollout.group_id for rollout, _ in kept)
            kept = [(each, value) for each, value in kept if n_kept[each.group_id] == n_all[each.group_id]]
        rows = [(rollout, segment) for rollout, value in kept for segment in value]
        indices = [index for index, (_, value) in enumerate(kept) for _ in value]
        whole = [segment for _, segment in rows]
        segments = whole if max_response_tokens is None else [segment.cut(max_response_tokens) for segment in whole]
        spans = [segment.version_span for segment in segments]
        experts, known = _experts(segments)
        own_rewards = [rollout.reward if each.reward is None else each.reward for rollout, each in rows]
        return Arrays(
            prompt_ids=_padded((s.prompt_ids for s in segments), np.int32, pad_id, left=True),
            prompt_mask=_padded((np.ones(len(s.prompt_ids), np.uint8) for s in segments), np.uint8, 0, left=True),
            response_ids=_padded((s.response_ids for s in segments), np.int32, pad_id),
            attention_mask=_padded((np.ones(len(s.response_ids), np.uint8) for s in segments), np.uint8, 0),
            response_mask=_padded((s.response_mask for s in segments), np.uint8, 0),
            response_logprobs=_padded((s.response_logprobs for s in segments), np.float32, 0.0),
            policy_versions=_padded((s.policy_versions for s in segments), np.int32, NO_VERSION),
            truncated=np.array(
                [len(s.response_ids) < len(w.response_ids) for s, w in zip(segments, whole, strict=True)], bool
            ),
            rewards=_column(rows, lambda r: np.nan if r.reward is None else r.reward, np.float32),
            row_rewards=np.array([np.nan if each is None else each for each in own_rewards], np.float32),
            turn_rewards=_padded((_of_turns(s) for s in segments), np.float32, 0.0),
            routed_experts=experts,
            experts_known=known,
            trainable=np.array(
                [r.trainable and s.trainable for (r, _), s in zip(rows, segments, strict=True)], np.bool_
            ),
            rollout_index=np.array(indices, np.int32),
            group_index=_column(rows, lambda r: r.group_index, np.int32),
            sample_index=_column(rows, lambda r: r.sample_index, np.int32),
            n_turns=_column(rows, lambda r: r.n_turns, np.int32),
            version_min=np.array([oldest for oldest, _ in spans], np.int32),
            version_max=np.array([newest for _, newest in spans], np.int32),
            finished_at=_column(rows, lambda r: np.nan if r.finished_at is None else r.finished_at, np.float64),
            group_ids=_column(rows, lambda r: r.group_id, np.str_),
            rollout_ids=_column(rows, lambda r: r.rollout_id, np.str_),
            instance_ids=_column(rows, lambda r: r.instance_id, np.str_),
            outcomes=_column(rows, lambda r: str(r.outcome or ""), np.str_),
            images=_images(segments),
        )

    def read(self, rows: Arrays, /) -> list[TrainingRow]:
        """Return the rows without padding; see `farm.adapters.protocol`."""
        return [_read(rows, index) for index in range(len(rows))]


arrays = ArraysAdapter()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The requested rows."""

    trainable_only: bool
    max_prompt_tokens: int | None
    max_response_tokens: int | None
    min_version: int | None

    def segments(self, rollout: Rollout) -> list[Segment]:
        if self.trainable_only and not rollout.trainable:
            return []
        return [segment for segment in rollout.segments if self._takes(segment)]

    def _takes(self, segment: Segment) -> bool:
        if self.max_prompt_tokens is not None and len(segment.prompt_ids) > self.max_prompt_tokens:
            return False
        if self.max_response_tokens is not None:
            segment = segment.cut(self.max_response_tokens)
        if self.trainable_only and not segment.trainable:
            return False
        return self.min_version is None or segment.version_span[0] >= self.min_version


def _read(rows: Arrays, index: int) -> TrainingRow:
    of_prompt, of_response = rows.prompt_mask[index] == 1, rows.attention_mask[index] == 1
    reward = float(rows.rewards[index])
    return TrainingRow(
        prompt_ids=tuple(rows.prompt_ids[index][of_prompt].tolist()),
        response_ids=tuple(rows.response_ids[index][of_response].tolist()),
        response_mask=tuple(rows.response_mask[index][of_response].tolist()),
        logprobs=tuple(rows.response_logprobs[index][of_response].tolist()),
        reward=None if np.isnan(reward) else reward,
        versions=tuple(rows.policy_versions[index][of_response].tolist()),
        rollout_id=str(rows.rollout_ids[index]),
    )


def _of_turns(segment: Segment) -> NDArray[np.float32]:
    rewards = np.zeros(len(segment.response_ids), np.float32)
    for position, reward in segment.turn_rewards if len(rewards) else ():
        # a turn without tokens has the index of the token before it
        rewards[max(position, 0)] += reward
    return rewards


def _images(segments: Sequence[Segment]) -> NDArray[np.str_]:
    most = max((len(segment.images) for segment in segments), default=0)
    rows = [[*segment.images, *[""] * (most - len(segment.images))] for segment in segments]
    return np.array(rows, "U64").reshape(len(segments), most)


def _experts(segments: Sequence[Segment]) -> tuple[ExpertIds, NDArray[np.uint8]]:
    """Return the experts of all rows, and where they are known. Raises ValueError for rows of different models."""
    experts = [segment.routed_experts for segment in segments if segment.routed_experts is not None]
    if not experts:
        return np.zeros((len(segments), 0, 0, 0), np.uint8), np.zeros((len(segments), 0), np.uint8)
    forms = {(each.n_layers, each.top_k) for each in experts}
    if len(forms) > 1:
        raise ValueError(f"rows have experts of different models, in (layers, experts per token): {sorted(forms)}")
    n_prompt = max(len(segment.prompt_ids) for segment in segments)
    width = n_prompt + max(len(segment.response_ids) for segment in segments)
    dtype = np.result_type(*(each.flat.dtype for each in experts))
    ids, known = np.zeros((len(segments), width, *forms.pop()), dtype), np.zeros((len(segments), width), np.uint8)
    for index, segment in enumerate(segments):
        if segment.routed_experts is not None:
            begin = n_prompt - len(segment.prompt_ids)
            columns = slice(begin, begin + len(segment.routed_experts))
            ids[index, columns], known[index, columns] = segment.routed_experts.ids, segment.routed_experts.known
    return ids, known


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

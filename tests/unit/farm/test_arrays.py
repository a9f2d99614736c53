"""Padded arrays: sides of the padding, whole groups, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from farm.adapters.arrays import arrays
from farm.rollout import Failure, Outcome, Rollout, Stage, State
from farm.trajectory import Segment, token_ids


def rollout(group: int, sample: int, n: int, reward: float | None = 1.0) -> Rollout:
    segment = Segment(
        token_ids(range(1, group + 3)),
        token_ids(range(10, 10 + n)),
        np.ones(n, np.uint8),
        np.full(n, -0.5, np.float32),
        np.full(n, 7, np.int32),
    )
    broken = reward is None
    return Rollout(
        rollout_id=f"b.{group}.{sample}",
        batch_id="b",
        group_index=group,
        sample_index=sample,
        data_source="noop",
        instance_id="",
        stage=Stage.EVAL,
        state=State.FAILED if broken else State.COMPLETED,
        attempt=1,
        node=None,
        outcome=Outcome.ENGINE_ERROR if broken else Outcome.SUBMITTED,
        reward=reward,
        failure=Failure("engine_error", "x") if broken else None,
        n_turns=1,
        n_response_tokens=n,
        submitted_at=0.0,
        finished_at=1.0,
        finish_seq=1,
        segments=(segment,),
    )


def test_prompts_are_padded_left_and_responses_right() -> None:
    found = arrays([rollout(0, 0, 2), rollout(1, 0, 3)], pad_id=99)
    assert found.prompt_ids.tolist() == [[99, 1, 2], [1, 2, 3]]
    assert found.prompt_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert found.response_ids.tolist() == [[10, 11, 99], [10, 11, 12]]
    assert found.response_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found.policy_versions.tolist() == [[7, 7, -1], [7, 7, 7]]
    assert found.response_logprobs.dtype == np.float32
    assert found.response_ids.dtype == np.int32
    assert found.group_ids.tolist() == ["b.0", "b.1"]


def test_what_broke_is_left_out_and_takes_its_group_along_if_asked() -> None:
    played = [rollout(0, 0, 2), rollout(0, 1, 2, reward=None), rollout(1, 0, 2), rollout(1, 1, 2)]
    assert arrays(played).rollout_ids.tolist() == ["b.0.0", "b.1.0", "b.1.1"]
    assert arrays(played, whole_groups=True).rollout_ids.tolist() == ["b.1.0", "b.1.1"]
    everything = arrays(played, trainable_only=False)
    assert everything.trainable.tolist() == [True, False, True, True]
    assert np.isnan(everything.rewards[1])
    assert everything.outcomes[1] == "engine_error"


def test_a_segment_that_is_not_exact_trains_nothing_and_takes_its_group_along_if_asked() -> None:
    one = rollout(0, 0, 2)
    (good,) = one.segments
    bad = replace(good, mismatch=0)
    empty = replace(good, response_mask=np.zeros(2, np.uint8))
    half, none, other = replace(one, segments=(bad, good)), replace(rollout(0, 1, 2), segments=(bad, empty)), one
    assert arrays([half, none]).rollout_ids.tolist() == ["b.0.0"]
    assert len(arrays([half, none], whole_groups=True)) == 0
    assert arrays([half, rollout(0, 1, 2)], whole_groups=True).rollout_ids.tolist() == ["b.0.0", "b.0.1"]
    everything = arrays([half, none, other], trainable_only=False)
    assert everything.trainable.tolist() == [False, True, False, False, True]


def test_no_rollouts_are_empty_arrays() -> None:
    found = arrays([])
    assert len(found) == 0
    assert found.response_ids.shape == (0, 0)

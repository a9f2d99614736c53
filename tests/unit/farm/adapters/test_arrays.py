"""Padded arrays: sides of the padding, whole groups, and omitted rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from farm.adapters.arrays import arrays
from farm.adapters.protocol import training_rows
from farm.errors import InvalidRequest
from farm.records.experts.routed_experts import RowExperts
from farm.records.rollout import Rollout, State
from farm.records.trajectory import Segment, token_ids
from tests.unit.farm.adapters.ended_rollout import rollout


def test_prompts_are_padded_left_and_responses_right() -> None:
    result = arrays([rollout(0, 0, 2), rollout(1, 0, 3)], pad_id=99)
    assert result.prompt_ids.tolist() == [[99, 1, 2], [1, 2, 3]]
    assert result.prompt_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert result.response_ids.tolist() == [[10, 11, 99], [10, 11, 12]]
    assert result.response_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert result.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert result.policy_versions.tolist() == [[7, 7, -1], [7, 7, 7]]
    assert result.response_logprobs.dtype == np.float32
    assert result.response_ids.dtype == np.int32
    assert result.group_ids.tolist() == ["b.0", "b.1"]


def routed(original: Rollout, n_layers: int = 2, top: int = 9) -> Rollout:
    [row] = original.segments
    n = len(row.prompt_ids) + len(row.response_ids)
    ids = np.arange(1, n + 1)[:, None, None] * np.ones((1, n_layers, 3), int) + top
    known = np.array([1] * (n - 1) + [0], np.uint8)
    numbers = (ids * known[:, None, None]).reshape(-1)
    flat = numbers.astype(np.uint8) if top < 200 else numbers.astype(np.uint16)
    return replace(original, segments=(replace(row, routed_experts=RowExperts(flat, n_layers, 3, known)),))


def test_experts_are_at_the_positions_of_their_tokens() -> None:
    result = arrays([routed(rollout(0, 0, 2)), routed(rollout(1, 0, 3), top=300)])
    assert result.routed_experts.shape == (2, 3 + 3, 2, 3)
    assert result.routed_experts.dtype == np.uint16
    assert result.routed_experts[0, :, 0, 0].tolist() == [0, 10, 11, 12, 0, 0]
    assert result.routed_experts[1, :, 1, 2].tolist() == [301, 302, 303, 304, 305, 0]
    assert result.experts_known.tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    there = np.concatenate([result.prompt_mask, result.attention_mask], axis=1)
    assert (result.experts_known <= there).all()


def test_experts_are_cut_with_their_responses() -> None:
    result = arrays([routed(rollout(0, 0, 5))], max_response_tokens=2)
    assert result.routed_experts[0, :, 0, 0].tolist() == [10, 11, 12, 13]
    assert result.experts_known.tolist() == [[1, 1, 1, 1]]


def test_rows_without_experts_have_unknown_experts() -> None:
    assert arrays([rollout(0, 0, 2)]).routed_experts.shape == (1, 0, 0, 0)
    assert arrays([]).experts_known.shape == (0, 0)
    mixed = arrays([rollout(0, 0, 2), routed(rollout(0, 1, 2))])
    assert mixed.experts_known.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    assert not mixed.routed_experts[0].any()


def test_rows_of_different_models_are_refused() -> None:
    with pytest.raises(ValueError, match="experts of different models"):
        arrays([routed(rollout(0, 0, 2)), routed(rollout(0, 1, 2), n_layers=4)])


def test_broken_rollouts_are_omitted_with_their_group_if_requested() -> None:
    rollouts = [rollout(0, 0, 2), rollout(0, 1, 2, reward=None), rollout(1, 0, 2), rollout(1, 1, 2)]
    assert arrays(rollouts).rollout_ids.tolist() == ["b.0.0", "b.1.0", "b.1.1"]
    assert arrays(rollouts, whole_groups=True).rollout_ids.tolist() == ["b.1.0", "b.1.1"]
    everything = arrays(rollouts, trainable_only=False)
    assert everything.trainable.tolist() == [True, False, True, True]
    assert np.isnan(everything.rewards[1])
    assert everything.outcomes[1] == "engine_error"


def test_inexact_segments_are_omitted_with_their_group_if_requested() -> None:
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


def test_no_rollouts_give_empty_arrays() -> None:
    result = arrays([])
    assert len(result) == 0
    assert result.response_ids.shape == (0, 0)


def with_rows(original: Rollout, *rows: Segment) -> Rollout:
    return replace(original, segments=rows)


def row(n_prompt: int, versions: list[int], mismatch: int | None = None) -> Segment:
    """A rollout sampled by these weight versions; 0 stands for a token that was not sampled."""
    mask = np.array([version != 0 for version in versions], np.uint8)
    numbers = np.where(mask == 1, np.array(versions), -1).astype(np.int32)
    n = len(versions)
    return Segment(token_ids(range(n_prompt)), token_ids(range(n)), mask, np.zeros(n, np.float32), numbers, mismatch)


def test_each_row_names_its_rollout() -> None:
    first = replace(
        with_rows(rollout(0, 1, 2), row(2, [7]), row(3, [7])), instance_id="q7", n_turns=3, finished_at=12.5
    )
    result = arrays([first, rollout(1, 0, 2)])
    assert result.rollout_ids.tolist() == ["b.0.1", "b.0.1", "b.1.0"]
    assert result.instance_ids.tolist() == ["q7", "q7", ""]
    assert result.n_turns.tolist() == [3, 3, 1]
    assert result.finished_at.tolist() == [12.5, 12.5, 1.0]


def test_advantages_count_each_rollout_once() -> None:
    many = with_rows(rollout(0, 0, 2, 1.0), *(row(2, [7, 7]) for _ in range(5)))
    result = arrays([many, rollout(0, 1, 2, 0.0), rollout(1, 0, 2, 0.3), rollout(1, 1, 2, 0.3)])
    assert result.rollout_index.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert np.allclose(result.group_advantages(scaled=False), [0.5] * 5 + [-0.5, 0.0, 0.0])
    assert np.allclose(result.group_advantages(), [1.0] * 5 + [-1.0, 0.0, 0.0], atol=1e-5)


def test_advantage_without_a_reward_is_nan() -> None:
    rollouts = [rollout(0, 0, 2, 1.0), rollout(0, 1, 2, None), rollout(0, 2, 2, 0.0), rollout(1, 0, 2, None)]
    result = arrays(rollouts, trainable_only=False).group_advantages(scaled=False)
    assert np.array_equal(result, np.array([0.5, np.nan, -0.5, np.nan], np.float32), equal_nan=True)
    assert arrays([]).group_advantages().tolist() == []


def test_long_responses_are_cut_and_long_prompts_are_omitted() -> None:
    original = with_rows(rollout(0, 0, 2), row(2, [7, 7, 7, 7]), row(9, [7]), row(2, [0, 0, 7]))
    result = arrays([original], max_prompt_tokens=8, max_response_tokens=2)
    # the third row has no sampled tokens left
    assert result.response_ids.tolist() == [[0, 1]]
    assert result.truncated.tolist() == [True]
    assert arrays([original], max_response_tokens=4).truncated.tolist() == [False, False, False]


def test_mismatch_beyond_the_cut_is_ignored() -> None:
    original = with_rows(rollout(0, 0, 2), row(2, [7, 7, 7, 7], mismatch=5))
    assert len(arrays([original])) == 0
    assert arrays([original], max_response_tokens=3).trainable.tolist() == [True]
    assert len(arrays([original], max_response_tokens=4)) == 0


def test_rows_of_older_weights_are_omitted() -> None:
    rows = (row(2, [5, 5]), row(2, [4, 5]), row(2, [0, 6]), row(2, [-1, 6]))
    original = with_rows(rollout(0, 0, 2), *rows)
    result = arrays([original], min_version=5)
    assert list(zip(result.version_min.tolist(), result.version_max.tolist(), strict=True)) == [(5, 5), (6, 6)]
    assert arrays([original]).version_min.tolist() == [5, 4, 6, -1]
    assert len(arrays([original, rollout(0, 1, 2)], min_version=7, whole_groups=True)) == 0


def test_images_of_rows_are_padded_and_never_cut() -> None:
    one, two = rollout(0, 0, 2), rollout(1, 0, 3)
    with_images = replace(two, segments=(replace(two.segments[0], images=("a" * 64, "b" * 64)),))
    assert arrays([one, with_images]).images.tolist() == [["", ""], ["a" * 64, "b" * 64]]
    assert arrays([one]).images.shape == (1, 0)
    with pytest.raises(InvalidRequest, match="a row with images"):
        arrays([with_images], max_response_tokens=2)


def test_other_formats_refuse_rows_with_images() -> None:
    (segment,) = rollout(0, 0, 2).segments
    original = replace(rollout(0, 0, 2), segments=(replace(segment, images=("a" * 64,)),))
    with pytest.raises(InvalidRequest, match=r"rollout b\.0\.0 has a training row with 1 images") as caught:
        list(training_rows([original]))
    assert caught.value.field == "agent_requests.images"
    assert [each.images for _, each in training_rows([original], with_images=True)] == [("a" * 64,)]
    # rows that do not train are not passed to the trainer
    assert not list(training_rows([replace(original, reward=None, state=State.FAILED)]))

"""One row per rollout: the choice of its segment, the row of a broken rollout, and checks before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from farm.adapters.conformance.adapter_promises import OBSERVED, broken, every_kind, only_broken, rollout, segment
from farm.adapters.single_row import RowLimits, most_sampled, replayed, rows_of_step, single_rows, with_experts
from farm.errors import InvalidRequest, NoTrainableRollouts
from farm.records.experts.routed_experts import RowExperts
from farm.records.rollout import Outcome
from farm.records.trajectory import Segment


def test_segment_with_the_most_sampled_tokens_is_the_row() -> None:
    first, second = segment(3, [7, 7]), segment(4, [7, OBSERVED, OBSERVED, OBSERVED, OBSERVED])
    assert most_sampled([second, first]) is first
    assert most_sampled([first, segment(9, [7, 7])]) is first
    rows = list(single_rows(every_kind()))
    assert [len(row.prompt_ids) for _, row in rows] == [2, 4, 2, 9, 2, 512, 1]
    assert len(list(single_rows(every_kind(), min_version=8))) == 2


def test_every_rollout_has_a_row_and_a_broken_one_gets_its_groups_mean() -> None:
    group = [
        rollout(0, [segment(2, [7])], reward=1.0),
        broken(1, Outcome.SANDBOX_ERROR, [segment(5, [7])]),
        rollout(2, [segment(2, [7])], reward=0.5),
        rollout(3, [segment(2, [7])], reward=0.0),
    ]
    rows = rows_of_step(group)
    assert [row.reward for row in rows] == [1.0, 1.0, 0.5, 0.0]
    assert [row.scored for row in rows] == [True, False, True, True]
    (placeholder,) = rows[1].segments
    assert (placeholder.prompt_ids.tolist(), placeholder.response_mask.tolist()) == ([100, 101, 102, 103, 104], [0])
    assert all(row.masked == (row.rollout.reward is None) for row in rows)


def test_advantages_of_scored_siblings_ignore_the_broken_one() -> None:
    scored = [rollout(0, [segment(2, [7])], reward=0.2), rollout(1, [segment(2, [7])], reward=0.9)]
    same_group = {"group_index": 0}
    step = [*scored, rollout(2, [], reward=None, outcome=Outcome.LOST, **same_group)]
    rewards = np.array([row.reward for row in rows_of_step(step)])
    assert np.allclose((rewards - rewards.mean())[:2], [-0.35, 0.35])
    assert np.isclose((rewards - rewards.mean())[2], 0)


def test_entirely_broken_group_gets_the_mean_of_the_step() -> None:
    step = [rollout(0, [segment(2, [7])], reward=0.5), broken(2, Outcome.LOST, []), broken(3, Outcome.CANCELLED, [])]
    rows = rows_of_step(step, pad_id=9)
    assert [row.reward for row in rows] == [0.5, 0.5, 0.5]
    assert rows[1].segments[0].prompt_ids.tolist() == [9]


def test_entirely_broken_group_can_be_masked() -> None:
    step = [rollout(0, [segment(2, [7, 7])]), broken(1, Outcome.LOST, []), rollout(2, [segment(2, [7])])]
    rows = rows_of_step(step, broken="mask_group")
    assert [row.masked for row in rows] == [True, True, False]
    assert rows[0].segments[0].response_mask.sum() == 0
    assert len(rows[0].segments[0].response_ids) == 2
    assert step[0].segments[0].response_mask.sum() == 2, "the rollout itself is unchanged"


def test_policy_that_ended_before_its_first_token_keeps_its_reward() -> None:
    step = [rollout(0, [segment(2, [7])], reward=1.0), rollout(1, [], reward=0.0, outcome=Outcome.DEADLINE)]
    early = rows_of_step(step)[1]
    assert (early.reward, early.scored, early.masked) == (0.0, True, True)


def routed(row: Segment, n_unknown: int = 1) -> Segment:
    n = len(row.prompt_ids) + len(row.response_ids)
    known = np.array([1] * (n - n_unknown) + [0] * n_unknown, np.uint8)
    return replace(row, routed_experts=RowExperts(np.arange(n * 6, dtype=np.uint16) % 500, 3, 2, known))


def test_training_rows_have_their_experts_and_placeholders_have_the_same_shape() -> None:
    own = routed(segment(2, [7, 7]))
    step = [rollout(0, [own], reward=1.0), broken(1, Outcome.LOST, [])]
    trained, placeholder = with_experts(rows_of_step(step), (3, 2), "option")
    [first], [second] = trained.segments, placeholder.segments
    assert first.routed_experts is own.routed_experts
    assert own.routed_experts is not None
    given = replayed(first)
    assert given is not None
    assert np.array_equal(given, own.routed_experts.ids[:3])
    fill = replayed(second)
    assert fill is not None
    assert fill.tolist() == [[[0, 1]] * 3] * (len(second.prompt_ids) + len(second.response_ids) - 1)
    assert replayed(segment(2, [7])) is None


@pytest.mark.parametrize("form", [(48, 8), (6, 1), (3, 4)])
def test_experts_of_another_model_are_refused(form: tuple[int, int]) -> None:
    step = [rollout(0, [routed(segment(2, [7, 7]))], reward=1.0)]
    with pytest.raises(InvalidRequest, match=r"are of 3 layers with 2 each, and the trainer's model has") as caught:
        with_experts(rows_of_step(step), form, "the.option")
    assert caught.value.field == "the.option"


def test_step_without_recorded_experts_has_the_shape_of_the_model() -> None:
    step = [rollout(0, [], reward=0.0, outcome=Outcome.DEADLINE), broken(1, Outcome.LOST, [])]
    rows = with_experts(rows_of_step(step, fallback=0.0), (48, 8), "option")
    assert [replayed(row.segments[0]).shape[1:] for row in rows] == [(48, 8)] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("row", [segment(2, [7, 7]), routed(segment(2, [7, 7]), 2), routed(segment(2, [7]), 3)])
def test_training_row_without_its_experts_is_refused(row: Segment) -> None:
    step = [rollout(0, [row], reward=1.0)]
    with pytest.raises(InvalidRequest, match=r"rollout constructed\.0\.0 were not recorded") as caught:
        with_experts(rows_of_step(step), (3, 2), "the.option")
    assert caught.value.field == "the.option"


def test_cut_row_has_the_experts_of_its_remaining_tokens() -> None:
    step = [rollout(0, [routed(segment(2, [7] * 6))], reward=1.0)]
    limits = RowLimits(response_tokens=3, too_long="cut")
    [row] = with_experts(rows_of_step(step, limits=limits), (3, 2), "option")
    given = replayed(row.segments[0])
    assert given is not None
    assert len(given) == 2 + 3 - 1


@pytest.mark.parametrize("kind", ["mismatch", "old"])
def test_inexact_or_too_old_rows_do_not_count(kind: str) -> None:
    bad = segment(2, [7, 7], mismatch=2) if kind == "mismatch" else segment(2, [6])
    step = [rollout(0, [segment(2, [7])], reward=1.0), rollout(1, [bad], reward=0.0)]
    row = rows_of_step(step, min_version=7)[1]
    assert (row.reward, row.scored, row.masked) == (1.0, False, True)


def test_step_without_trainable_rollouts_is_an_error_with_counts_of_reasons() -> None:
    with pytest.raises(NoTrainableRollouts, match=r"none of \d+ rollouts may train: .*1 sandbox_error.*: constructed"):
        rows_of_step(only_broken())
    assert {row.reward for row in rows_of_step(only_broken(), fallback=0.25)} == {0.25}


def test_too_long_rows_are_refused_by_rollout_and_option() -> None:
    step = [rollout(0, [segment(2, [7])]), rollout(1, [segment(3, [7] * 5)])]
    with pytest.raises(
        InvalidRequest, match=r"constructed\.0\.1 has a response of 5 tokens, and max_completion"
    ) as caught:
        rows_of_step(step, limits=RowLimits(response_tokens=4, response_option="max_completion_length"))
    assert caught.value.field == "max_completion_length"
    with pytest.raises(InvalidRequest, match=r"constructed\.0\.1 has a prompt of 3 tokens"):
        rows_of_step(step, limits=RowLimits(prompt_tokens=2))
    with pytest.raises(InvalidRequest, match=r"constructed\.0\.1 has a row of 8 tokens, and max_len is 7"):
        rows_of_step(step, limits=RowLimits(total_tokens=7, total_option="max_len"))


def test_too_long_rows_are_cut_or_masked_by_option() -> None:
    step = [rollout(0, [segment(2, [7])]), rollout(1, [segment(3, [7] * 5)], reward=0.75)]
    cut = rows_of_step(step, limits=RowLimits(response_tokens=4, too_long="cut"))[1]
    assert (len(cut.segments[0].response_ids), cut.masked) == (4, False)
    total = rows_of_step(step, limits=RowLimits(total_tokens=5, too_long="cut"))[1]
    assert len(total.segments[0].response_ids) == 2
    masked = rows_of_step(step, limits=RowLimits(response_tokens=4, too_long="mask"))[1]
    # it trains nothing, so it has no share in the mean of its group
    assert (masked.masked, masked.too_long, masked.reward, masked.scored) == (True, True, step[0].reward, False)
    prompt = rows_of_step(step, limits=RowLimits(prompt_tokens=2, too_long="cut"))[1]
    assert (prompt.masked, len(prompt.segments[0].prompt_ids), prompt.reward) == (True, 1, step[0].reward)
    of_group = rows_of_step(step, broken="mask_group", limits=RowLimits(response_tokens=4, too_long="mask"))
    assert [row.masked for row in of_group] == [False, True], "only broken rollouts mask their group"


def test_groups_are_those_of_the_trainer_if_it_has_its_own() -> None:
    first = [rollout(0, [segment(2, [7])], reward=1.0), broken(2, Outcome.LOST, [segment(2, [7])])]
    second = [rollout(4, [segment(2, [7])], reward=0.0), broken(6, Outcome.LOST, [segment(2, [7])])]
    step = [*first, *second]
    assert len({each.group_id for each in step}) == 4
    rows = rows_of_step(step, groups=["a", "a", "b", "b"])
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert not any(row.group_unscored for row in rows)
    # by the farm's groups, two groups broke entirely, which have the mean of the step
    of_farm = rows_of_step(step)
    assert [row.reward for row in of_farm] == [1.0, 0.5, 0.0, 0.5]
    assert [row.group_unscored for row in of_farm] == [False, True, False, True]


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"constructed\.0\.0 has the token id 1100, but .* has 500") as caught:
        rows_of_step([rollout(0, [segment(2, [7])])], limits=RowLimits(vocabulary=500))
    assert caught.value.field == "vocabulary"


def test_scored_rollout_without_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"constructed\.0\.1 was scored, but has no training row"):
        rows_of_step([rollout(0, [segment(2, [7])]), rollout(1, [], n_response_tokens=12)])


def test_every_segment_is_a_row_if_the_trainer_accepts_several() -> None:
    rows = rows_of_step(every_kind(), every_segment=True)
    assert [len(row.segments) for row in rows][:3] == [1, 3, 1]
    assert all(len(each.response_ids) for row in rows for each in row.segments)

"""Trainers' formats without the trainers: every outcome has a word, and rows pass the checks of each trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from farm.adapters import openrlhf, rllm, skyrl, slime, trl, verl
from farm.adapters.conformance.adapter_promises import broken, calls_of, every_kind, rollout, segment
from farm.adapters.single_row import rows_of_step
from farm.adapters.trl_worker import group_rows
from farm.errors import InvalidRequest, NoTrainableRollouts
from farm.records.request import Limits
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout

TABLES: Sequence[Mapping[Outcome, Any]] = (
    trl.STOP_REASONS,
    verl.STOP_REASONS,
    skyrl.STOP_REASONS,
    slime.STATUSES,
    openrlhf.TRUNCATED,
)


@pytest.mark.parametrize("table", TABLES)
def test_every_outcome_has_a_word(table: Mapping[Outcome, Any]) -> None:
    assert [*table] == [*Outcome]


@pytest.mark.parametrize("table", TABLES)
def test_repeating_policy_is_not_reported_as_cut_short(table: Mapping[Outcome, Any]) -> None:
    """Trainers omit or mask rollouts that were cut short."""
    assert table[Outcome.REPEATING] == table[Outcome.INVALID_ACTION] == table[Outcome.SUBMITTED]
    assert table[Outcome.REPEATING] != table[Outcome.MAX_TOKENS]


def test_rllm_has_a_reason_for_every_outcome_of_the_policy() -> None:
    assert {*rllm._REASONS} == POLICY_OUTCOMES
    assert rllm._REASONS[Outcome.REPEATING] == "ENV_DONE"


def test_cut_answer_is_a_too_long_response_for_rllm() -> None:
    """A prompt without room is another reason, for another of rLLM's filters."""
    made = rollout(1, [segment(2, [7])], outcome=Outcome.CONTEXT_FULL)
    (whole,) = calls_of(made)
    cut = replace(whole, finish_reason="length")
    assert rllm.reason_name(Outcome.CONTEXT_FULL, [whole, cut]) == "MAX_RESPONSE_LENGTH_EXCEEDED"
    assert rllm.reason_name(Outcome.CONTEXT_FULL, [cut, replace(whole, finish_reason="stop")]) == (
        "MAX_PROMPT_LENGTH_EXCEEDED"
    )
    assert rllm.reason_name(Outcome.CONTEXT_FULL, []) == "MAX_PROMPT_LENGTH_EXCEEDED"
    assert rllm.reason_name(Outcome.DEADLINE, [cut]) == "TIMEOUT"


def test_broken_rollout_has_no_reward_for_trl() -> None:
    output = trl._output(rows_of_step(every_kind()))
    assert {len(column) for column in output.values()} == {12}
    unscored = [reward is None for reward in output["farm_reward"]]
    assert unscored == [False, False, False, True, True, False, False, False, True, True, False, False]
    assert all(len(ids) for ids in output["completion_ids"])
    assert output["farm_stop_reason"][3:5] == ["error", "abort"]
    rewards = trl.reward_from_farm([], [], farm_reward=output["farm_reward"])
    assert rewards[2:4] == [0.0, None]

    def length(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [1.0 for _ in completions]

    scored = trl.scored_only(length)
    assert scored([0, 1], farm_reward=[0.5, None]) == [1.0, None]


def test_prompts_match_their_instances_even_if_a_data_set_adds_keys_to_messages() -> None:
    message = {"role": "user", "content": "x"}
    assert trl.prompt_key([message]) == trl.prompt_key([{**message, "tool_calls": None}])
    assert trl.prompt_key("x") == "x"
    func = trl.FarmRolloutFunc(None, {"x": None})  # type: ignore[arg-type, dict-item]
    with pytest.raises(InvalidRequest, match=r"no instance is known for the prompt 'y'; 1 others are"):
        func._instance("y")


def generated(rollouts: Sequence[Rollout], *, step_wise: bool, **options: Any) -> dict[str, Any]:
    config = SimpleNamespace(step_wise_trajectories=step_wise)
    generator = skyrl.FarmGenerator(None, config, "run", **options)  # type: ignore[arg-type]
    return generator._output(rollouts, [TrajectoryId(each.group_id, each.rollout_id) for each in rollouts])


class TrajectoryId(NamedTuple):
    """Like SkyRL's `TrajectoryID`."""

    instance_id: str
    rollout_id: str


def test_skyrl_has_one_row_per_prompt_with_fields_as_long_as_its_response() -> None:
    output = generated(every_kind(), step_wise=False)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    assert {len(output[name]) for name in names} == {12}
    for ids, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs) > 0
    assert output["rewards"][3] == output["rewards"][2] == 0.0, "its only scored sibling earned a zero"
    assert output["rewards"][4] == output["rewards"][5] == 0.75
    assert output["rollout_metrics"]["farm/n_unscored"] == 4


def test_skyrl_steps_of_a_trajectory_are_adjacent_and_the_last_has_the_reward() -> None:
    output = generated(every_kind(), step_wise=True)
    of_branched = [index for index, each in enumerate(output["trajectory_ids"]) if each.rollout_id.endswith("0.1")]
    assert of_branched == [1, 2, 3]
    assert [output["is_last_step"][index] for index in of_branched] == [False, False, True]
    assert [output["rewards"][index] for index in of_branched] == [0.0, 0.0, -0.25]
    assert output["is_last_step"][-1] is True


def skyrl_generator(**config: Any) -> skyrl.FarmGenerator:
    client = SimpleNamespace(weight_version=7)
    return skyrl.FarmGenerator(None, SimpleNamespace(**config), "run", inference_engine_client=client)  # type: ignore[arg-type]


def test_sampling_parameters_of_skyrl_are_mapped_or_refused() -> None:
    values = {"temperature": 0.7, "max_generate_length": 5, "min_p": 0.0, "logprobs": 1, "min_tokens": 1, "top_k": -1}
    params = skyrl_generator()._sampling(values | {"stop": ["END"], "include_stop_str_in_output": True})
    assert (params.temperature, params.max_tokens, params.min_tokens, params.top_k) == (0.7, 5, 1, -1)
    assert (params.min_p, params.stop, params.cache_salt) == (0.0, ("END",), "7")
    with pytest.raises(InvalidRequest, match=r"^sampling_params\.bad_words: the farm has no such parameter"):
        skyrl_generator()._sampling({"bad_words": ["no"]})
    # parameters that are not passed are those of the configuration
    own = SimpleNamespace(temperature=0.5, max_generate_length=9, additional_kwargs=None, stop=None)
    params = skyrl_generator(sampling_params=own, use_cache_salt=False)._sampling({})
    assert (params.temperature, params.max_tokens, params.cache_salt) == (0.5, 9, None)


def test_options_of_skyrl_bound_an_episode_after_limits_of_the_user() -> None:
    config = SimpleNamespace(max_turns=3, max_input_length=100, chat_template_kwargs={"enable_thinking": False})
    made = skyrl.FarmGenerator(None, config, "run", max_seq_len=200, settings={"limits": Limits(max_turns=8)})  # type: ignore[arg-type]
    limits = made._run.settings["limits"]
    assert (limits.max_turns, limits.max_prompt_tokens, limits.max_row_tokens) == (8, 100, 200)
    assert made._run.settings["chat_template_kwargs"] == {"enable_thinking": False}
    for name, value in {"use_conversation_multi_turn": False, "vision_language_generator": True}.items():
        with pytest.raises(InvalidRequest, match=name):
            skyrl_generator(**{name: value})
    with pytest.raises(InvalidRequest, match="chat_template"):
        skyrl_generator(chat_template=SimpleNamespace(name_or_path="qwen3_without_thinking"))


def test_options_of_skyrl_for_cut_rows_are_applied() -> None:
    cut = rollout(1, [segment(2, [7])], reward=1.0, outcome=Outcome.MAX_TOKENS)
    # SkyRL's own generator ends the last of several turns like any turn that was not cut
    step = [rollout(0, [segment(2, [7])], reward=1.0, outcome=Outcome.MAX_TURNS), cut]
    assert [row["loss_masks"] for row in (skyrl_generator()._output(step, None),)] == [[[1], [1]]]
    assert skyrl_generator(apply_overlong_filtering=True)._output(step, None)["loss_masks"] == [[1], [0]]
    assert skyrl_generator(zero_reward_on_non_stop=True)._output(step, None)["rewards"] == [1.0, 0.0]


def test_evaluation_by_skyrl_omits_problems_without_scored_rollouts() -> None:
    step = [rollout(0, [segment(2, [7])]), broken(1, Outcome.LOST, []), broken(2, Outcome.LOST, [])]
    assert len(skyrl_generator()._output(step, None)["rewards"]) == 3
    with pytest.raises(NoTrainableRollouts, match=r"no rollout of 1 problems of an evaluation was scored .*first is"):
        skyrl_generator()._output(step, None, "eval")
    assert len(skyrl_generator()._output(step[:2], None, "eval")["rewards"]) == 2


def test_entirely_broken_group_does_not_end_skyrls_fully_asynchronous_trainer() -> None:
    generator = skyrl_generator()
    lost = [broken(1, Outcome.LOST, []), broken(2, Outcome.LOST, [])]
    of_one = [SimpleNamespace(instance_id="problem")] * 2
    assert generator._output(lost, of_one)["rewards"] == [0.0, 0.0]
    rollouts = [rollout(0, [segment(2, [7])], reward=1.0), rollout(1, [segment(2, [7])], reward=0.5)]
    generator._output(rollouts, of_one)
    output = generator._output(lost, of_one)
    assert output["rewards"] == [0.75, 0.75], "the mean of all rewards so far"
    assert not any(map(any, output["loss_masks"]))
    # a step of several groups without trainable rollouts is an error, and so is a run without any score so far
    of_two = [SimpleNamespace(instance_id=name) for name in ("one", "other")]
    with pytest.raises(NoTrainableRollouts, match="2 lost"):
        generator._output(lost, of_two)
    hopeless = skyrl_generator()
    for _ in range(16):
        hopeless._output(lost, of_one)
    with pytest.raises(NoTrainableRollouts, match="2 lost"):
        hopeless._output(lost, of_one)


def test_skyrl_without_instances_is_refused() -> None:
    generator = skyrl.FarmGenerator(None, SimpleNamespace(), "run")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="env_extras"):
        asyncio.run(generator.generate({"prompts": ["x"], "env_extras": None}))


def sample(group: int, rollout_id: int, reward: float) -> SimpleNamespace:
    return SimpleNamespace(group_index=group, rollout_id=rollout_id, get_reward_value=lambda args: reward)


def test_slime_rewards_count_a_rollout_with_several_samples_once() -> None:
    samples = [sample(0, 0, 1.0), sample(0, 0, 1.0), sample(0, 0, 1.0), sample(0, 1, 0.0), sample(1, 2, 0.5)]
    raw, centred = slime.group_rewards(SimpleNamespace(grpo_std_normalization=False), samples)
    assert raw == [1.0, 1.0, 1.0, 0.0, 0.5]
    assert centred == [0.5, 0.5, 0.5, -0.5, 0.0]


@pytest.mark.parametrize(("option", "value"), [("rollout_top_p", 0.9), ("partial_rollout", True), ("group_rm", True)])
def test_unsupported_options_of_slime_are_named(option: str, value: Any) -> None:
    samples = slime.SlimeSamples(None, "run")  # type: ignore[arg-type]
    samples.check(SimpleNamespace())
    with pytest.raises(InvalidRequest) as caught:
        samples.check(SimpleNamespace(**{option: value}))
    assert caught.value.field == option
    several = slime.SlimeSamples(None, "run", every_segment=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"farm\.adapters\.slime\.group_rewards"):
        several.check(SimpleNamespace())


def test_placeholder_of_openrlhf_trains_one_token() -> None:
    step = rows_of_step([rollout(0, [segment(2, [7])]), broken(1, Outcome.LOST, [segment(3, [7, 7])])], pad_id=5)
    fields = openrlhf.placeholder_fields(step[1])
    assert fields["scores"] == fields["reward"], "one rollout of its group was scored"
    assert fields["observation_tokens"] == [100, 101, 102, 5]
    assert fields["action_ranges"] == [(3, 4)]
    assert fields["reward"] == step[0].reward


def test_advantages_are_over_scored_members_and_equal_for_all_rows_of_a_rollout() -> None:
    group = [
        rollout(0, [segment(2, [7])], reward=1.0),
        rollout(1, [segment(2, [7]), segment(3, [7, 7])], reward=0.0),
        broken(2, Outcome.LOST, [segment(2, [7])]),
    ]
    # divided by the population's standard deviation
    assert [row.advantage for row in group_rows(group)] == pytest.approx([1.0, -1.0, -1.0])
    rows = group_rows(group, scaled=False)
    assert [(row.rollout.rollout_id[-3:], row.advantage) for row in rows] == [
        ("0.0", 0.5),
        ("0.1", -0.5),
        ("0.1", -0.5),
    ]
    assert group_rows(group[1:]) == [], "a single rollout has no comparison"

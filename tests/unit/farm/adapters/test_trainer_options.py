"""Options of trainers as fields of a batch: sampling and limits are mapped, other options of rollouts are refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farm.adapters import openrlhf, rllm, skyrl, slime, slime_collecting, trl, verl
from farm.adapters.trainer_sampling import TrainerSampling, limits_of
from farm.errors import InvalidRequest
from farm.records.request import Limits, SamplingParams

SAMPLED: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


OPTIONS = json.loads((Path(__file__).parents[3] / "data" / "trainer_options.json").read_text())
"""All options of each trainer's rollouts: `mapped`, `refused` unless they are the default, or the trainer's own."""


@pytest.mark.parametrize(
    ("trainer", "mapped", "refused"),
    [
        ("trl.GRPOConfig", trl.MAPPED, trl.REFUSED),
        ("trl.AsyncGRPOConfig", trl.MAPPED_OF_ASYNC, ()),
        ("skyrl.GeneratorConfig", skyrl.MAPPED, skyrl.REFUSED),
        ("verl.rollout", verl.MAPPED, verl.REFUSED),
        ("slime.arguments", slime_collecting.MAPPED, slime_collecting.REFUSED | slime_collecting.REFUSED_OF_BATCHES),
        ("openrlhf.train_ppo_ray", openrlhf.MAPPED, openrlhf.REFUSED),
        ("rllm.base", rllm.MAPPED, ()),
    ],
)
def test_every_option_of_a_trainer_is_mapped_refused_or_its_own(
    trainer: str, mapped: Collection[str], refused: Collection[str]
) -> None:
    listed = OPTIONS[trainer]
    assert sorted(name.removesuffix(".enable_return_routed_experts") for name in mapped) == listed["mapped"]
    assert sorted(refused) == listed["refused"]
    every = [*listed["mapped"], *listed["refused"], *itertools.chain(*listed["of_trainer"].values())]
    assert len(set(every)) == len(every)


def test_every_option_left_to_the_trainer_has_a_reason() -> None:
    for trainer, listed in OPTIONS.items():
        assert all(reason and names for reason, names in listed["of_trainer"].items()), trainer
    evaluations = OPTIONS["slime.EvalDatasetConfig"]
    assert sorted(slime_collecting.REFUSED_OF_EVALUATIONS) == evaluations["refused"]


def test_trainers_page_counts_their_options() -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "users" / "trainers.md").read_text()
    rows = re.findall(r"`([\w.]+)` (\d+), (\d+), (\d+)", page)
    counted = {name: tuple(map(int, numbers)) for name, *numbers in rows}
    assert counted == {
        name: (len(each["mapped"]), len(each["refused"]), sum(map(len, each["of_trainer"].values())))
        for name, each in OPTIONS.items()
    }


def test_neutral_sampling_values_are_sent_unchanged() -> None:
    sampling = TrainerSampling("params")
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1}
    # a server takes an omitted value from the model's generation_config.json
    assert sampling.params(neutral) == SamplingParams(
        top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, min_tokens=0
    )
    form = {"logprobs": 0, "skip_special_tokens": False, "no_stop_trim": True, "stop": None, "ignore_eos": False}
    assert sampling.params(form) == SamplingParams()
    assert sampling.params({"stop": "END", "stop_token_ids": [3], "sampling_seed": 5}) == SamplingParams(
        stop=("END",), stop_token_ids=(3,), seed=5
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"ignore_eos": True}, "params.ignore_eos"),
        ({"n": 2}, "params.n"),
        ({"logit_bias": {"5": 1.0}}, "params.logit_bias"),
        ({"temperature": -1}, "params.temperature"),
        ({"cache_salt": ""}, "params.cache_salt"),
        ({"top_k": "many"}, "params.top_k"),
    ],
)
def test_wrong_or_unknown_parameter_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TrainerSampling("params").params(values)
    assert caught.value.field == field


def test_limits_of_the_user_override_those_of_the_trainer() -> None:
    assert limits_of({}, max_turns=3, max_row_tokens=None) == Limits(max_turns=3)
    both = limits_of({"limits": Limits(max_turns=8, run_s=5)}, max_turns=3, max_row_tokens=100)
    assert (both.max_turns, both.run_s, both.max_row_tokens) == (8, 5, 100)
    assert limits_of({"limits": {"max_turns": 8}}, max_turns=3).max_turns == 8
    with pytest.raises(InvalidRequest, match=r"limits\.max_turns"):
        limits_of({"limits": {"max_turns": 0}})


def trl_args(**changed: Any) -> SimpleNamespace:
    own = {"max_completion_length": 256, "chat_template_kwargs": None, "max_tool_calling_iterations": None}
    of_grpo = {"generation_kwargs": None, "vllm_max_model_length": None, "vllm_structured_outputs_regex": None}
    return SimpleNamespace(**{**SAMPLED, **own, **of_grpo, **changed})


def test_arguments_of_trl_set_sampling_and_limits() -> None:
    request = trl.trl_request(trl_args(max_tool_calling_iterations=3, vllm_max_model_length=900), {})
    assert request["sampling"] == SamplingParams(**SAMPLED)
    limits = request["limits"]
    assert limits == Limits(max_turns=4, max_response_tokens=256, max_tokens=256, max_row_tokens=900)
    thinking = {"enable_thinking": False}
    assert trl.trl_request(trl_args(chat_template_kwargs=thinking), {})["chat_template_kwargs"] == thinking
    extra = trl.trl_request(trl_args(generation_kwargs={"stop": ["END"], "top_k": 5}), {})["sampling"]
    assert (extra.stop, extra.top_k) == (("END",), 5)
    own = trl.trl_request(trl_args(), {"sampling": SamplingParams(top_k=1), "limits": {"max_turns": 2}})
    assert (own["sampling"].top_k, own["limits"].max_turns, own["limits"].max_response_tokens) == (1, 2, 256)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams"),
        ({"generation_kwargs": {"suppress_tokens": [1]}}, "generation_kwargs.suppress_tokens"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
    ],
)
def test_unsupported_arguments_of_trl_are_named(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        trl.trl_request(trl_args(**changed), {})
    assert caught.value.field == field


def test_asynchronous_worker_of_trl_bounds_each_call() -> None:
    args = SimpleNamespace(
        **SAMPLED,
        max_completion_length=64,
        chat_template_kwargs=None,
        max_tool_calling_iterations=None,
        token_budget=512,
    )
    request = trl.trl_request(args, {})
    assert request["sampling"].max_tokens == 64
    assert request["limits"] == Limits(max_row_tokens=512)
    args.token_budget = 0
    assert trl.trl_request(args, {})["limits"] == Limits()


def verl_config(**changed: Any) -> SimpleNamespace:
    multi_turn = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None,
    }
    multi_turn |= {name.removeprefix("multi_turn."): changed.pop(name) for name in [*changed] if "." in name}
    values = {"temperature": 0.8, "top_p": 0.95, "top_k": -1, "prompt_length": 100, "response_length": 300}
    validation = SimpleNamespace(temperature=0, top_p=1.0, top_k=-1)
    rest = {"val_kwargs": validation, "multi_turn": SimpleNamespace(**multi_turn), "full_determinism": False}
    return SimpleNamespace(**{**values, **rest, **changed})


def test_configuration_of_verl_sets_sampling_and_limits() -> None:
    config = verl_config(**{"multi_turn.max_assistant_turns": 6, "multi_turn.max_user_turns": 3})
    train, validation = (verl.rollout_request(config, {}, validate=validate) for validate in (False, True))
    drawn = SamplingParams(temperature=0.8, top_p=0.95, top_k=-1, repetition_penalty=1.0)
    assert train["sampling"] == drawn
    assert validation["sampling"] == SamplingParams(temperature=0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    bounds = Limits(max_turns=4, max_tokens=300, max_response_tokens=300, max_row_tokens=400)
    assert train["limits"] == validation["limits"] == bounds
    config = verl_config(full_determinism=True, seed=42, **{"multi_turn.max_tool_response_length": 1000})
    train = verl.rollout_request(config, {}, validate=False)
    assert (train["sampling"].seed, train["limits"].max_observation_chars) == (42, 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ignore_eos", True),
        ("over_sample_rate", 0.1),
        ("multi_turn.tool_config_path", "tools.yaml"),
        ("multi_turn.tool_response_truncate_side", "left"),
    ],
)
def test_unsupported_options_of_verl_are_named(name: str, value: Any) -> None:
    verl.check_rollout_config(verl_config())
    with pytest.raises(InvalidRequest) as caught:
        verl.check_rollout_config(verl_config(**{name: value}))
    assert caught.value.field == f"actor_rollout_ref.rollout.{name}"


def test_routing_is_replayed_only_in_training() -> None:
    train, validation = (
        verl.rollout_request(verl_config(), {}, validate=validate, experts=(48, 8)) for validate in (False, True)
    )
    assert (train["sampling"].routed_experts, validation["sampling"].routed_experts) == (8, None)
    args = SimpleNamespace(use_rollout_routing_replay=True, num_layers=48, moe_router_topk=8)
    samples = slime.SlimeSamples(None, "run")  # type: ignore[arg-type]
    assert samples._request(args, {}, "train")["sampling"].routed_experts == 8
    assert samples._request(args, {}, "eval")["sampling"].routed_experts is None
    args.use_rollout_routing_replay = False
    assert samples._request(args, {}, "train")["sampling"].routed_experts is None


@pytest.mark.parametrize(
    ("config", "form", "field"),
    [
        (SimpleNamespace(enable_return_routed_experts=True), None, "expert_form"),
        (SimpleNamespace(enable_return_routed_experts=False), (48, 8), ""),
        (SimpleNamespace(enable_return_routed_experts=True), (48, 8), ""),
    ],
)
def test_skyrl_replays_routing_of_a_model_whose_shape_is_configured(config: Any, form: Any, field: str) -> None:
    given = SimpleNamespace(inference_engine=config)
    if field:
        with pytest.raises(InvalidRequest) as caught:
            skyrl.FarmGenerator(None, given, "run", expert_form=form)  # type: ignore[arg-type]
        assert caught.value.field == field
        return
    made = skyrl.FarmGenerator(None, given, "run", expert_form=form)  # type: ignore[arg-type]
    assert made.expert_form == (form if config.enable_return_routed_experts else None)


def test_evaluation_of_slime_has_its_own_parameters() -> None:
    args = SimpleNamespace(
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=8192,
        rollout_stop=None,
        rollout_stop_token_ids=[7],
        rollout_max_context_len=9000,
        eval_max_context_len=20_000,
    )
    samples = slime.SlimeSamples(None, "run")  # type: ignore[arg-type]
    train = samples._request(args, None, "train")
    assert train["sampling"] == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8192, stop_token_ids=(7,)
    )
    assert train["limits"] == Limits(max_row_tokens=9000)
    theirs = {"temperature": 0.0, "top_p": 0.7, "max_new_tokens": 16_384, "spaces_between_special_tokens": False}
    evaluated = samples._request(args, theirs, "eval")
    assert evaluated["sampling"] == SamplingParams(temperature=0.0, top_p=0.7, max_tokens=16_384)
    assert evaluated["limits"] == Limits(max_row_tokens=20_000)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rm_type": "math"}, "rm_type"),
        ({"custom_rm_path": "my.rm"}, "custom_rm_path"),
        ({"reward_key": "score"}, "reward_key"),
        ({"multimodal_keys": {"image": "file"}}, "multimodal_keys"),
        ({"rollout_sample_hook_path": ["my.hook"]}, "rollout_sample_hook_path"),
        ({"rollout_all_samples_process_path": "my.process"}, "rollout_all_samples_process_path"),
    ],
)
def test_unsupported_options_of_slime_are_named(changed: dict[str, Any], field: str) -> None:
    unset = dict.fromkeys((*slime_collecting.REFUSED, *slime_collecting.REFUSED_OF_BATCHES))
    options = {**unset, **slime_collecting.UNCHANGED, **changed}

    def never_connected() -> Any:
        raise AssertionError("options are checked before the first rollout")

    with pytest.raises(InvalidRequest) as caught:
        slime.rollout_function(never_connected, "run")(SimpleNamespace(**options), 0, None)
    assert caught.value.field == field


def test_template_variables_and_seed_of_slime_are_used() -> None:
    args = SimpleNamespace(
        **dict.fromkeys(slime_collecting.MAPPED),
        sglang_enable_deterministic_inference=True,
    )
    args.rollout_seed, args.apply_chat_template_kwargs, args.rollout_top_p = 42, {"enable_thinking": False, "a": 1}, 1.0
    settings = {"chat_template_kwargs": {"a": 2}}
    request = slime.SlimeSamples(None, "run", settings=settings)._request(args, None, "train")  # type: ignore[arg-type]
    assert request["sampling"] == SamplingParams(top_p=1.0, seed=42)
    assert request["chat_template_kwargs"] == {"enable_thinking": False, "a": 2}
    args.sglang_enable_deterministic_inference = False
    assert slime.SlimeSamples(None, "run")._request(args, None, "train")["sampling"].seed is None  # type: ignore[arg-type]

"""SkyRL's own checks, tensors and advantages on the farm's rollouts: `skyrl_rows.py FARM_URL`."""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
import typing_extensions

# SkyRL's records are checked by pydantic, which accepts no other before Python 3.12
typing.TypedDict = typing_extensions.TypedDict

from problems_of_tests import breaking, chat  # type: ignore[import-not-found]  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage  # noqa: E402
from skyrl.train.config import GeneratorConfig  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import concatenate_generator_outputs, prepare_generator_input  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

import farm  # noqa: E402
from farm.adapters.conformance.adapter_promises import every_kind  # noqa: E402
from farm.adapters.skyrl import FarmGenerator  # noqa: E402
from farm.errors import InvalidRequest  # noqa: E402

N = 4


def main(url: str) -> None:
    with farm.connect(url) as client:
        facts: dict[str, Any] = {
            "plain": run_step(client, step_wise=False),
            "step_wise": run_step(client, step_wise=True),
        }
        facts["experts"] = experts(client)
    facts["constructed"] = constructed()
    facts["refused"] = refused()
    print(json.dumps(facts))


def generator(client: Any, step_wise: bool, **options: Any) -> FarmGenerator:
    config = GeneratorConfig(step_wise_trajectories=step_wise, max_input_length=512)
    return FarmGenerator(client, config, f"skyrl-{step_wise}", settings={"max_attempts": 1}, **options)


def run_step(client: Any, *, step_wise: bool) -> dict[str, Any]:
    """Run a step that SkyRL itself prepares, and check it like its trainer."""
    prompts = [
        {"prompt": [{"role": "user", "content": str(n)}], "env_class": "farm", "uid": f"u{n}",
         "env_extras": {"farm_instance": instance.model_dump()}}
        for n, instance in enumerate([chat("a"), breaking("b"), chat("c")])
    ]  # fmt: skip
    # as its trainer makes them from its own default configuration
    default = GeneratorConfig(max_input_length=512)
    default.sampling_params.max_generate_length = 64
    theirs = get_sampling_params_for_backend("vllm", default.sampling_params)
    batch, uids = prepare_generator_input(prompts, N, theirs, "farm", "train", 5)
    farm_generator = generator(client, step_wise)
    output = asyncio.run(farm_generator.generate(batch))
    again = asyncio.run(generator(client, step_wise).generate(batch))
    metrics = output.pop("rollout_metrics")
    validate_generator_output(len(batch["prompts"]), output, step_wise=step_wise)
    concatenate_generator_outputs([output, again | {"rollout_metrics": None}], step_wise=False)
    advantages = advantages_of(output, uids)
    return {
        "rows": len(output["response_ids"]),
        "rewards": output["rewards"],
        "scored_mean": metrics["farm/mean_reward"],
        "n_unscored": metrics["farm/n_unscored"],
        "masked": [not any(mask) for mask in output["loss_masks"]],
        "stop_reasons": sorted(set(output["stop_reasons"])),
        "advantages_of_broken": advantages[N : 2 * N],
        "same_when_again": output["response_ids"] == again["response_ids"],
        "asked": newest_sampling(client),
    }


def experts(client: Any) -> dict[str, Any]:
    """Run a step with routing replay; return the ids of each row, its experts and SkyRL's own tensor of them."""
    config = GeneratorConfig(max_input_length=512)
    config.inference_engine.enable_return_routed_experts = True
    settings = {"max_attempts": 1}
    fields = []
    for wrong in (config, GeneratorConfig(step_wise_trajectories=True, inference_engine=config.inference_engine)):
        try:
            FarmGenerator(client, wrong, "wrong", settings=settings)
        except InvalidRequest as error:
            fields.append(error.field)
    farm_generator = FarmGenerator(client, config, "replayed", settings=settings, expert_form=(2, 4))
    prompts = [
        {"prompt": "x", "env_class": "farm", "uid": f"u{n}", "env_extras": {"farm_instance": instance.model_dump()}}
        for n, instance in enumerate([chat("a"), breaking("b")])
    ]
    batch, _ = prepare_generator_input(prompts, N, None, "farm", "train", 5)
    output = asyncio.run(farm_generator.generate(batch))
    output.pop("rollout_metrics")
    validate_generator_output(2 * N, output)
    indices = output["rollout_expert_indices"]
    tensors = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0),
        *(output[name] for name in ("prompt_token_ids", "response_ids")),
        [[0.0] * len(ids) for ids in output["response_ids"]],
        *(output[name] for name in ("loss_masks", "rollout_logprobs")),
        rollout_expert_indices=indices,
    )
    triples = zip(tensors[0], tensors[1].bool(), tensors[6], strict=True)
    of_tensor = [[ids[mask].tolist(), of[mask].tolist()] for ids, mask, of in triples]
    pairs = zip(output["prompt_token_ids"], output["response_ids"], indices, strict=True)
    batch, _ = prepare_generator_input(prompts[:1], 1, None, "farm", "eval", 5)
    evaluated = asyncio.run(farm_generator.generate(batch))
    return {
        "refused": fields,
        "rows": [[prompt + response, of] for prompt, response, of in pairs],
        "tensor": of_tensor,
        "evaluated": evaluated["rollout_expert_indices"],
    }


def newest_sampling(client: Any) -> dict[str, Any]:
    """Return the sampling parameters of a call of the newest batch."""
    rollouts = client.collect(client.batches(1)[0].batch_id)
    return dict(client.calls(rollouts[0].rollout_id)[0].sampling)


def advantages_of(output: dict[str, Any], uids: list[str]) -> list[float]:
    """Return each row's advantage by SkyRL's GRPO, at its last token, from SkyRL's own tensors."""
    pairs = zip(output["response_ids"], output["rewards"], strict=True)
    rewards = [[0.0] * (len(ids) - 1) + [reward] for ids, reward in pairs]
    tensors = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0),
        output["prompt_token_ids"],
        output["response_ids"],
        rewards,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    _, _, response_mask, token_rewards, loss_mask, logprobs = tensors[:6]
    assert logprobs.shape == loss_mask.shape == token_rewards.shape
    assert torch.equal(loss_mask.sum(1), torch.tensor([sum(mask) for mask in output["loss_masks"]]))
    advantages, _ = compute_grpo_outcome_advantage(token_rewards, response_mask, np.array(uids))
    assert bool(torch.isfinite(advantages).all())
    values: list[float] = [float(row[mask.bool()][-1]) for row, mask in zip(advantages, response_mask, strict=True)]
    return values


def constructed() -> dict[str, Any]:
    """Check rollouts of every kind, plain and step-wise."""
    rollouts = every_kind()
    ids = [TrajectoryID(each.instance_id, each.sample_index) for each in rollouts]
    plain = generator(None, False)._output(rollouts, ids)
    validate_generator_output(len(rollouts), plain)
    steps = generator(None, True)._output(rollouts, ids)
    validate_generator_output(len(rollouts), steps, step_wise=True)
    advantages = advantages_of(plain, [each.instance_id for each in rollouts])
    return {"rows": len(plain["response_ids"]), "steps": len(steps["response_ids"]), "broken": advantages[3]}


def refused() -> list[str]:
    """Show that SkyRL's checks find faults, so that passing them is evidence."""
    rollouts = every_kind()
    ids = [TrajectoryID(each.instance_id, each.sample_index) for each in rollouts]
    output = generator(None, True)._output(rollouts, ids)
    faults: dict[str, Any] = {
        "loss_masks": lambda masks: [mask[1:] for mask in masks],
        "is_last_step": lambda last: [*last[:-1], False],
        "trajectory_ids": lambda ids: ids[::-1],
    }
    found = []
    for name, spoil in faults.items():
        spoiled = deepcopy(output)
        spoiled[name] = spoil(spoiled[name])
        try:
            validate_generator_output(len(rollouts), spoiled, step_wise=True)
        except AssertionError:
            found.append(name)
    return found


main(sys.argv[1])

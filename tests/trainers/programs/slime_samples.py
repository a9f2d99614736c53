"""slime's, or miles', own checks of the farm's samples: `slime_samples.py FARM_URL slime|miles`."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

from absent_modules import leave_out  # type: ignore[import-not-found]
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]

import farm
from farm.adapters.conformance.adapter_promises import every_kind
from farm.adapters.slime import SlimeSamples, generate_function, group_rewards, rollout_function
from farm.errors import InvalidRequest

leave_out("sglang", "sglang_router", "megatron")
URL, PACKAGE = sys.argv[1:3]
Sample: Any = importlib.import_module(f"{PACKAGE}.utils.types").Sample
base_types: Any = importlib.import_module(f"{PACKAGE}.rollout.base_types")
N = 4
OPTIONS: dict[str, Any] = {"settings": {"max_attempts": 1}}


def args(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "rollout_batch_size": 3,
            "n_samples_per_prompt": N,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 64,
            "rollout_max_prompt_len": 400,
            "rollout_max_context_len": 800,
            "rollout_stop": None,
            "reward_key": None,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": False,
            "custom_reward_post_process_path": None,
            **changed,
        }
    )


class Source:
    """slime's data source, with three problems."""

    def __init__(self) -> None:
        self.n_drawn = 0

    def get_samples(self, n: int) -> list[list[Any]]:
        instances = [chat("a"), breaking("b"), chat("c")]
        first, self.n_drawn = self.n_drawn, self.n_drawn + n
        return [
            [
                Sample(
                    group_index=group,
                    index=group * N + k,
                    prompt="x",
                    metadata={"farm_instance": instances[group % 3].model_dump()},
                )
                for k in range(N)
            ]
            for group in range(first, first + n)
        ]


def connect() -> Any:
    return farm.connect(URL)


def main() -> None:
    function = rollout_function(connect, f"{PACKAGE}-run", **OPTIONS)
    output = base_types.call_rollout_fn(function, args(), 3, Source(), evaluation=False)
    again = base_types.call_rollout_fn(function, args(), 4, Source(), evaluation=False)
    flat = checked(output.samples)
    facts = {
        "kind": type(output).__module__,
        "groups": [len(group) for group in output.samples],
        "rewards": [sample.reward for sample in flat],
        "removed": [sample.remove_sample for sample in flat],
        "status": [sample.status.value for sample in flat],
        "versions": sorted({version for sample in flat for version in sample.weight_versions}),
        "normalized": normalized(flat),
        "n_removed": output.metrics["farm/n_removed"],
        "other_step": [sample.metadata["farm_rollout_id"] for sample in checked(again.samples)]
        != [sample.metadata["farm_rollout_id"] for sample in flat],
        "generated": generated(),
        "several": several(),
        "filtered": filtered(function),
        "collected": collected(),
        "refused": refused(function),
        "evaluated": evaluated(),
        "experts": experts(),
    }
    print(json.dumps(facts))


def checked(groups: list[list[Any]]) -> list[Any]:
    """Check every sample by the package's own rules; return them."""
    flat = [sample for group in groups for sample in group]
    for sample in flat:
        if hasattr(sample, "validate"):
            sample.validate()
        else:
            sample._validate_response_metadata_lengths()
        assert sample.response_length > 0
        assert len(sample.tokens) > sample.response_length
        assert Sample.from_dict(sample.to_dict()).tokens == sample.tokens
        assert sample.get_reward_value(args()) is not None
    return flat


def normalized(flat: list[Any]) -> list[float]:
    """Return the advantages by slime's own normalization of raw rewards; only its class needs Ray's actors."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    rewards = torch.tensor([sample.get_reward_value(args()) for sample in flat]).reshape(-1, N)
    values: list[float] = (rewards - rewards.mean(dim=-1, keepdim=True)).flatten().tolist()
    return values


def generated() -> dict[str, Any]:
    """Call the generate function for the samples of a group at once, as both packages do."""
    generate = generate_function(connect, PACKAGE, **OPTIONS)

    async def run() -> list[Any]:
        groups = Source().get_samples(2)
        first = await asyncio.gather(*(generate(args(), sample, {}) for sample in groups[0]))
        return [*first, *await asyncio.gather(*(generate(args(), sample, {}) for sample in groups[1]))]

    flat = checked([asyncio.run(run())])
    mean = sum(sample.reward for sample in flat[:N]) / N
    return {
        "batches": len({sample.metadata["farm_rollout_id"].split(".")[0] for sample in flat}),
        "broken_is_neutral": all(sample.reward == mean and sample.remove_sample for sample in flat[N:]),
    }


def collected() -> dict[str, Any]:
    """Over-sample by slime's options and filter by its own rule; then again, as after a restart without checkpoint."""
    rule = f"{PACKAGE}.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    given = args(rollout_batch_size=2, over_sampling_batch_size=4, dynamic_sampling_filter_path=rule)
    steps = []
    function = None
    for rollout_id, again in ((0, False), (1, False), (0, True), (1, True)):
        if function is None or (again and rollout_id == 0):
            function = rollout_function(connect, f"{PACKAGE}-collected", **OPTIONS)
            source = Source()
        steps.append(base_types.call_rollout_fn(function, given, rollout_id, source, evaluation=False))
    ids = [[sample.metadata["farm_rollout_id"] for sample in checked(step.samples)] for step in steps]
    first, second = steps[0], steps[1]
    return {
        "sizes": [len(group) for step in (first, second) for group in step.samples],
        "varied": all(len({sample.reward for sample in group}) == 2 for group in first.samples + second.samples),
        "removed": sum(sample.remove_sample for group in first.samples for sample in group),
        "again": ids[:2] == ids[2:],
        "disjoint": not set(ids[0]) & set(ids[1]),
        "indices": [sample.index for sample in checked(second.samples)],
        "prompts": sorted({sample.prompt for sample in checked(first.samples)}),
        "dropped": sorted({name for step in (first, second) for name in step.metrics if "drop_" in name}),
    }


def filtered(function: Any) -> list[bool]:
    """Return the removed samples of the first two groups if a user's rule removes some, and requests one again."""
    output = base_types.call_rollout_fn(
        function, args(rollout_sample_filter_path="__main__.rule"), 3, Source(), evaluation=False
    )
    return [sample.remove_sample for group in output.samples[:2] for sample in group]


def rule(args: Any, groups: list[list[Any]]) -> None:
    """Remove the first sample of the first group, and none of the second."""
    groups[0][0].remove_sample = True
    for sample in groups[1]:
        sample.remove_sample = False


def several() -> dict[str, Any]:
    """Fill samples with rollouts of every kind, all of their segments."""
    rollouts = every_kind()
    samples = [Sample(group_index=each.group_index, index=index) for index, each in enumerate(rollouts)]
    wide = args(rollout_max_prompt_len=None, rollout_max_context_len=None)
    filled = SlimeSamples(connect, "x", every_segment=True).fill(wide, samples, rollouts)
    flat = checked(filled)
    if PACKAGE == "slime":
        from slime.observability.rollout_data_utils import validate_rollout_id_annotated

        validate_rollout_id_annotated([filled])
    raw, centred = group_rewards(args(), flat)
    return {"n": [len(each) for each in filled], "first_group": centred[:4], "raw": raw[:4]}


def experts() -> dict[str, Any]:
    """Run with routing replay, by both functions; return the tokens and the experts of each sample."""
    given = args(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=4, moe_layer_freq=1)
    function = rollout_function(connect, f"{PACKAGE}-replayed", **OPTIONS)
    flat = checked(base_types.call_rollout_fn(function, given, 3, Source(), evaluation=False).samples)
    generate = generate_function(connect, f"{PACKAGE}-replayed", **OPTIONS)

    async def run(evaluation: bool) -> list[Any]:
        (group,) = Source().get_samples(1)
        return await asyncio.gather(*(generate(given, sample, {}, evaluation=evaluation) for sample in group))

    generated, evaluation = asyncio.run(run(False)), asyncio.run(run(True))
    every = [*flat, *generated]
    if PACKAGE == "slime":
        import torch
        from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay

        validate_rollout_routed_experts_for_replay(
            [torch.as_tensor(sample.rollout_routed_experts) for sample in every], given
        )
        for sample in every:
            # as slime reads the same experts from SGLang's answer
            theirs = Sample(tokens=sample.tokens[: -sample.response_length])
            meta = {"routed_experts": sample.rollout_routed_experts.tobytes()}
            answer = sample.tokens[-sample.response_length :]
            theirs.append_response_tokens(
                given, tokens=answer, log_probs=sample.rollout_log_probs, meta_info=meta, trainable=True
            )
            ours = torch.as_tensor(sample.rollout_routed_experts)
            assert theirs.rollout_routed_experts.dtype == ours.dtype
            assert torch.equal(theirs.rollout_routed_experts, ours)
    return {
        "rows": [[sample.tokens, sample.rollout_routed_experts.tolist()] for sample in every],
        "types": sorted({str(sample.rollout_routed_experts.dtype) for sample in every}),
        "evaluated": [sample.rollout_routed_experts for sample in evaluation],
    }


def evaluated() -> dict[str, Any]:
    """Call the generate function like slime's evaluation, and return the sampling parameters of its call."""
    generate = generate_function(connect, f"{PACKAGE}-eval", **OPTIONS)
    theirs = {
        "temperature": 0.0,
        "top_p": 0.7,
        "top_k": 20,
        "max_new_tokens": 48,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "min_new_tokens": 1,
    }

    async def run() -> list[Any]:
        ((one, *_), *_) = Source().get_samples(1)
        one.group_index = None
        return [await generate(args(), one, theirs, evaluation=True)]

    (sample,) = checked([asyncio.run(run())])
    with farm.connect(URL) as client:
        return dict(client.calls(sample.metadata["farm_rollout_id"])[0].sampling)


def refused(function: Any) -> list[str]:
    fields = []
    own = rollout_function(connect, f"{PACKAGE}-long", settings={"max_attempts": 1, "limits": {"max_row_tokens": 4096}})
    for changed in ({"rollout_top_p": 0.9}, {"partial_rollout": True}, {"rollout_max_context_len": 10}):
        try:
            (own if "rollout_max_context_len" in changed else function)(args(**changed), 3, Source(), evaluation=False)
        except InvalidRequest as error:
            fields.append(error.field)
    try:
        function(args(), 3, Source(), evaluation=True)
    except InvalidRequest as error:
        fields.append(error.field)
    return fields


main()

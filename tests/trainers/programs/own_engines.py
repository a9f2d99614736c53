"""A trainer's own client of its engines runs the farm's rollouts: `own_engines.py FARM_URL TRAINER ENGINE_URL MODEL
FOLDER`.

The engine is a scripted one with vLLM's routes; for slime it is the router in front of one with SGLang's. `FOLDER` has
its tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx2
from problems_of_tests import chat  # type: ignore[import-not-found]

import farm

FARM_URL, TRAINER, ENGINE, MODEL, FOLDER = sys.argv[1:]
N = 4
GENERATE = f"{ENGINE}/inference/v1/generate"
TOKENIZER = SimpleNamespace(name_or_path=FOLDER, eos_token_id=2, pad_token_id=0)


class _Sampled:
    """The ids and log-probabilities that the trainer's client returned."""

    def __init__(self) -> None:
        self.answers: list[tuple[list[int], list[float]]] = []

    def has(self, ids: Any, logprobs: Any) -> bool:
        return (list(ids), [round(float(each), 5) for each in logprobs]) in self.answers

    def take(self, ids: Any, logprobs: Any) -> None:
        self.answers.append((list(ids), [round(float(each), 5) for each in logprobs]))


SAMPLED = _Sampled()


def skyrl() -> list[bool]:
    """SkyRL's RemoteInferenceClient, as its trainer passes it to `get_generator`."""
    import typing_extensions

    # SkyRL's records are checked by pydantic, which accepts no other before Python 3.12
    typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.train.config import GeneratorConfig
    from skyrl.train.generators.utils import prepare_generator_input

    from farm.adapters.skyrl import FarmGenerator

    class Client(RemoteInferenceClient):  # type: ignore[misc, unused-ignore]
        async def generate(self, input_batch: Any, model: Any = None) -> Any:
            output = await super().generate(input_batch, model)
            SAMPLED.take(output["response_ids"][0], output["response_logprobs"][0])
            return output

    config = GeneratorConfig(max_input_length=512)
    config.sampling_params.max_generate_length = 64
    prompts = [{"prompt": [], "env_class": "farm", "uid": "u", "env_extras": {"farm_instance": chat("a").model_dump()}}]
    sampling = get_sampling_params_for_backend("vllm", config.sampling_params)
    batch, _ = prepare_generator_input(prompts, N, sampling, "farm", "train", 5)

    async def run_result(connected: Any) -> Any:
        client = Client(proxy_url=ENGINE, server_urls=[ENGINE], data_parallel_size=1, model_name=MODEL)
        client.increment_weight_version()
        tokenizer = _Vocabulary(FOLDER)
        generator = FarmGenerator(connected, config, "skyrl-own", tokenizer=tokenizer, inference_engine_client=client)
        try:
            return await generator.generate(batch)
        finally:
            await client.teardown()

    with farm.connect(FARM_URL) as connected:
        output = asyncio.run(run_result(connected))
    rows = zip(output["response_ids"], output["rollout_logprobs"], strict=True)
    return [SAMPLED.has(ids, logprobs) for ids, logprobs in rows]


class _Vocabulary:
    """The part of a tokenizer that the adapter uses."""

    def __init__(self, name_or_path: str) -> None:
        self.name_or_path = name_or_path

    def __len__(self) -> int:
        return 100_000


def verl() -> list[bool]:
    """verl's LLMServerClient and its load balancer, in front of two servers that answer verl's own records."""
    import numpy as np
    import ray
    import torch  # type: ignore[import-not-found, unused-ignore]
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from examples.trainers.verl_farm import Manager

    class Own(Manager):
        connect = staticmethod(lambda: farm.connect(FARM_URL))  # type: ignore[assignment]
        run = "verl-own"
        settings = {"max_attempts": 1}  # noqa: RUF012

    class Server:
        """A rollout server of verl's: takes ids and vLLM's parameters, answers verl's TokenOutput."""

        async def generate(
            self, prompt_ids: Any, sampling_params: Any, request_id: str, image_data: Any = None, video_data: Any = None
        ) -> Any:
            # as in verl's own server: a number for a yes-or-no parameter
            params = {**sampling_params, "logprobs": 0 if sampling_params["logprobs"] else None}
            body = {"model": MODEL, "token_ids": list(prompt_ids), "sampling_params": params, "return_token_ids": True}
            async with httpx2.AsyncClient(trust_env=False) as http:
                (choice,) = (await http.post(GENERATE, json=body)).raise_for_status().json()["choices"]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            told = {"global_steps": 5}
            return TokenOutput(
                token_ids=choice["token_ids"], log_probs=logprobs, stop_reason="completed", extra_fields=told
            )

    class Client(LLMServerClient):  # type: ignore[misc, unused-ignore]
        async def generate(self, *words: Any, **named: Any) -> Any:
            output = await super().generate(*words, **named)
            SAMPLED.take(output.token_ids, output.log_probs)
            return output

    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    rollout = {"name": "vllm", "n": N, "prompt_length": 64, "response_length": 48, **drawn}
    rollout["val_kwargs"] = {"n": 1, **drawn}
    names = {"project_name": "farm", "experiment_name": "verl"}
    config = OmegaConf.create({"trainer": names, "actor_rollout_ref": {"rollout": rollout, "model": {"path": FOLDER}}})
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        servers = {f"s{number}": ray.remote(Server).remote() for number in range(2)}
        balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers)
        manager = Own.create(config=config, llm_client=Client(config, balancer))
        instances = [chat("a").model_dump_json()] * N
        rows = DataProto(
            batch=TensorDict({"dummy_tensor": torch.zeros(N, 1)}, batch_size=N),
            non_tensor_batch={"uid": np.array(["u"] * N, object), "farm_instance": np.array(instances, object)},
            meta_info={"global_steps": 5},
        )
        batch = manager.generate_sequences(rows).batch
    finally:
        ray.shutdown()
    n = batch["response_mask"].sum(1).tolist()
    pairs = zip(batch["responses"].tolist(), batch["rollout_log_probs"].tolist(), n, strict=True)
    return [SAMPLED.has(ids[:long], logprobs[:long]) for ids, logprobs, long in pairs]


def openrlhf() -> list[bool]:
    """An actor's engine as OpenRLHF's executors call it: `generate(ids, sampling_params)` answers a RequestOutput."""
    from absent_modules import leave_out  # type: ignore[import-not-found]

    leave_out("vllm", "flash_attn", "deepspeed", "optree", "peft", "bitsandbytes")
    from examples.trainers.openrlhf_farm import AgentExecutor

    class Own(AgentExecutor):
        connect = staticmethod(lambda: farm.connect(FARM_URL))  # type: ignore[assignment]
        settings = {"max_attempts": 1}  # noqa: RUF012

    class Actor:
        kwargs = {"max_model_len": 512}  # noqa: RUF012

        async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
            params = vars(sampling_params)
            body = {"model": MODEL, "token_ids": prompt_token_ids, "sampling_params": params, "return_token_ids": True}
            async with httpx2.AsyncClient(trust_env=False) as http:
                (choice,) = (await http.post(GENERATE, json=body)).raise_for_status().json()["choices"]
            places = [{each["token_id"]: each} for each in choice["logprobs"]["content"]]
            logprobs = [{token: SimpleNamespace(**at) for token, at in place.items()} for place in places]
            sample = SimpleNamespace(
                token_ids=choice["token_ids"],
                logprobs=logprobs,
                finish_reason=choice["finish_reason"],
                stop_reason=choice.get("stop_reason"),
            )
            SAMPLED.take(sample.token_ids, [each["logprob"] for each in choice["logprobs"]["content"]])
            return SimpleNamespace(outputs=[sample], prompt_token_ids=prompt_token_ids)

    sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, logprobs=1)
    label = chat("a").model_dump_json()

    async def executed() -> list[dict[str, Any]]:
        executor, actor = Own(), Actor()
        calls = [executor.execute("p", label, sampling, 512, TOKENIZER, actor) for _ in range(N)]
        return list(await asyncio.gather(*calls))

    result = []
    for response in asyncio.run(executed()):
        ((start, end),) = response["action_ranges"]
        ids, logprobs = response["observation_tokens"][start:end], response["rollout_log_probs"][start:end]
        result.append(SAMPLED.has(ids, logprobs))
    return result


def slime() -> list[bool]:
    """slime's rollout function and its generate function share the servers of its router, whose address `ENGINE` is."""
    from absent_modules import leave_out

    leave_out("sglang", "sglang_router", "megatron")
    from slime.rollout.base_types import call_rollout_fn
    from slime.utils.types import Sample

    from farm.adapters.slime import generate_function, rollout_function

    host, port = ENGINE.removeprefix("http://").split(":")
    drawn = {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 64}
    lengths = {"rollout_max_prompt_len": 400, "rollout_max_context_len": 800, "eval_max_context_len": 800}
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": N}
    router = {"sglang_router_ip": host, "sglang_router_port": int(port), "hf_checkpoint": FOLDER}
    args = SimpleNamespace(**drawn, **lengths, **sizes, **router)
    metadata = {"farm_instance": chat("a").model_dump()}

    class Source:
        def get_samples(self, n: int) -> list[list[Any]]:
            return [[Sample(group_index=0, index=k, prompt="x", metadata=dict(metadata)) for k in range(N)]]

    def connect() -> Any:
        return farm.connect(FARM_URL)

    trained = rollout_function(connect, "slime-own", settings={"max_attempts": 1})
    evaluated = generate_function(connect, "slime-own-eval", settings={"max_attempts": 1})
    params = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64}
    samples = [*call_rollout_fn(trained, args, 3, Source(), evaluation=False).samples[0]]
    sample = Sample(group_index=None, index=0, prompt="x", metadata=dict(metadata))
    samples.append(asyncio.run(evaluated(args, sample, params, evaluation=True)))
    samples += call_rollout_fn(trained, args, 4, Source(), evaluation=False).samples[0]
    return [bool(each.rollout_log_probs) and not each.remove_sample for each in samples]


def main() -> None:
    trainers: dict[str, Callable[[], list[bool]]] = {"skyrl": skyrl, "verl": verl, "openrlhf": openrlhf, "slime": slime}
    same = trainers[TRAINER]()
    with farm.connect(FARM_URL) as client:
        rollouts = client.collect(client.batches(1)[0].batch_id)
        calls = [call for rollout in rollouts for call in client.calls(rollout.rollout_id)]
        listed = [state.engine.model for state in client.engines()]
    facts = {
        "same": same,
        "rewards": sorted({float(rollout.reward or 0.0) for rollout in rollouts}),
        "versions": sorted({rollout.version_min for rollout in rollouts}, key=str),
        "n_shared": sum(ENGINE in call.engine for call in calls),
        "engines": sorted({call.engine for call in calls}),
        "exact": all(call.token_exact for call in calls),
        "listed": listed,
    }
    print(json.dumps(facts))


main()

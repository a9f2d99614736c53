"""SkyRL's own generator compared with the farm's: the same tokens become the same output and the same tensors.

`skyrl_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with its
tokenizer. The farm runs rollouts; their recorded calls are then the answers of `SkyRLGymGenerator`'s inference client,
and the environment's replies are those of an environment of skyrl_gym.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from copy import deepcopy
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
import typing_extensions

# SkyRL's records are checked by pydantic, which accepts no other before Python 3.12
typing.TypedDict = typing_extensions.TypedDict

import skyrl_gym  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from recorded_episodes import (  # type: ignore[import-not-found]  # noqa: E402
    LONG,
    PLAIN,
    TOOL,
    N,
    Recording,
    differing,
    problem,
)
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage  # noqa: E402
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.generators.utils import prepare_generator_input  # noqa: E402
from skyrl_gym.envs.base_text_env import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    BaseTextEnv,
    BaseTextEnvStepOutput,
)
from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]  # noqa: E402

import farm  # noqa: E402
from farm.adapters.skyrl import FarmGenerator  # noqa: E402

URL, ENGINE, MODEL = sys.argv[1:4]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


class RecordedEnv(BaseTextEnv):  # type: ignore[misc, unused-ignore]
    """Returns the replies of the farm's environment, and the farm's scores."""

    episodes: ClassVar[dict[int, tuple[Recording, float]]] = {}

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.recording, self.reward = self.episodes[extras["place"]]
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        call = self.recording.calls[self.turns - 1]
        said = [{"role": each["role"], "content": each["content"]} for each in call.observations]
        done = not said or self.turns >= self.max_turns
        reward = self.reward if done else 0.0
        return BaseTextEnvStepOutput(observations=said, reward=reward, done=done, metadata={})


class _Client:
    """The part of SkyRL's inference client that its generator calls."""

    weight_version = 7

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def generate(self, engine_input: Any, model: str | None = None) -> dict[str, Any]:
        (session,) = engine_input["session_ids"]
        recording, _ = RecordedEnv.episodes[int(session.rpartition("_")[2])]
        call = recording.answer(engine_input["prompt_token_ids"][0], engine_input["sampling_params"])
        ids = call.response_ids.tolist()
        return {
            "responses": [TOKENIZER.decode(ids)],
            "response_ids": [ids],
            "stop_reasons": [call.finish_reason],
            "response_logprobs": [call.response_logprobs.tolist()],
        }

    async def finish_session(self, session_id: str) -> None:
        """Nothing is kept."""


def compared(client: Any, question: str, **changed: Any) -> dict[str, Any]:
    """Compare the two outputs of a problem; `changed` are fields of SkyRL's configuration."""
    longest = changed.pop("max_generate_length", 96)
    config = GeneratorConfig(**({"max_turns": 8, "max_input_length": 512} | changed))
    config.sampling_params.max_generate_length = longest
    config.sampling_params.logprobs = 0
    config.eval_sampling_params.max_generate_length = longest
    theirs = get_sampling_params_for_backend("vllm", config.sampling_params)
    instance = problem(question, ENGINE)
    row = {
        "prompt": [{"role": "user", "content": question}],
        "env_class": "recorded",
        "uid": "u0",
        "env_extras": {"farm_instance": instance.model_dump()},
    }
    batch, uids = prepare_generator_input([row], N, theirs, "recorded", "train", 5)
    batch["env_extras"] = [{**each, "place": place} for place, each in enumerate(deepcopy(batch["env_extras"]))]
    farm_generator = FarmGenerator(client, config, f"own-{json.dumps(changed)}-{longest}", settings={"max_attempts": 1})
    ours = asyncio.run(farm_generator.generate(batch))
    rollouts = client.collect(client.batches(1)[0].batch_id)
    for place, rollout in enumerate(rollouts):
        RecordedEnv.episodes[place] = (Recording(client.calls(rollout.rollout_id)), rollout.reward)
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), _Client(), TOKENIZER)
    output = asyncio.run(generator.generate(deepcopy(batch), disable_tqdm=True))
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "stop_reasons")
    sides = [{name: each[name] for name in names} | tensors(each, uids) for each in (ours, output)]
    recordings = [recording for recording, _ in RecordedEnv.episodes.values()]
    return {
        "differing": differing(*sides),
        "faults": [fault for recording in recordings for fault in recording.faults],
        "stop_reasons": [sorted(set(each["stop_reasons"])) for each in (ours, output)],
        "lengths": [len(list(stretch)) for _, stretch in groupby(ours["loss_masks"][0])],
        "n_prompt": len(ours["prompt_token_ids"][0]),
        "rewards": sorted({rollout.reward for rollout in rollouts}),
    }


def tensors(output: dict[str, Any], uids: list[str]) -> dict[str, torch.Tensor]:
    """Return SkyRL's own tensors and advantages of an output; a reward that is a number is on the last token."""
    pairs = zip(output["response_ids"], output["rewards"], strict=True)
    rewards = [each if isinstance(each, list) else [0.0] * (len(ids) - 1) + [each] for ids, each in pairs]
    made = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=TOKENIZER.pad_token_id),
        output["prompt_token_ids"],
        output["response_ids"],
        rewards,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")
    named = dict(zip(names, made[:6], strict=True))
    advantages, _ = compute_grpo_outcome_advantage(named["rewards"], named["response_mask"], np.array(uids))
    return named | {"advantages": advantages}


def main() -> None:
    """Compare each kind of episode; print the differences."""
    skyrl_gym.register(id="recorded", entry_point=RecordedEnv)
    with farm.connect(URL) as client:
        facts = {
            "stop": compared(client, PLAIN),
            "cut": compared(client, LONG, max_generate_length=4),
            "tool": compared(client, TOOL),
        }
        turn, observation, _ = facts["tool"]["lengths"]
        so_far = facts["tool"]["n_prompt"] + turn + observation
        facts |= {
            "cut_call": compared(client, TOOL, max_generate_length=turn - 1, max_turns=2),
            "one_turn": compared(client, TOOL, max_turns=1),
            "input_just_fits": compared(client, TOOL, max_input_length=so_far),
            "input_too_long": compared(client, TOOL, max_input_length=so_far - 1),
            "without_those_cut": compared(client, LONG, max_generate_length=4, apply_overlong_filtering=True),
            "zero_for_those_cut": compared(client, LONG, max_generate_length=4, zero_reward_on_non_stop=True),
        }
    print(json.dumps(facts))


main()

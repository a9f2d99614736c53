"""TRL's GRPOTrainer trains on the CPU, with rollouts of the farm.

`trl_training.py FARM_URL MODEL_TEXT RUN POLICY`; its initial policy is written to the folder POLICY.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

import farm
from farm.adapters.conformance.adapter_promises import rollout, segment
from farm.adapters.single_row import rows_of_step
from farm.adapters.trl import _output, prompt_key, reward_from_farm, rollout_func, scored_only
from farm.errors import InvalidRequest
from farm.records.rollout import Outcome

URL, MODEL_TEXT, RUN = sys.argv[1:4]
POLICY = sys.argv[4]
N, STEPS = 4, 3
TOKENIZER = AutoTokenizer.from_pretrained(MODEL_TEXT)
INSTANCES = {"a": chat("a"), "b": breaking("b"), "c": chat("c")}
PROMPTS = {name: [{"role": "user", "content": f"problem {name}"}] for name in INSTANCES}
BY_PROMPT = {prompt_key(prompt): INSTANCES[name] for name, prompt in PROMPTS.items()}


def main() -> None:
    policy(len(TOKENIZER)).save_pretrained(POLICY)
    TOKENIZER.save_pretrained(POLICY)
    with farm.connect(URL) as client:
        first, parameters = trained(client, RUN, 0.05)
        again, _ = trained(client, RUN, 0.05)
        facts = {
            "losses": first["losses"],
            "grad_norms": first["grad_norms"],
            "finite": all(map(math.isfinite, first["losses"] + first["grad_norms"] + parameters[1])),
            "moved": parameters[0],
            "reward_of_trl": first["rewards"],
            "reward_of_farm": first["farm_rewards"],
            "unscored": first["unscored"],
            "clipped_ratio": first["clipped"],
            "versions": first["versions"],
            "newest_version": client.newest_version(),
            "asked": dict(client.calls(first["rollout_ids"][0][0])[0].sampling),
            "same_rollouts_again": first["rollout_ids"] == again["rollout_ids"],
            "advantages": advantages_of_a_mixed_group(),
            "too_long": refused(client, max_completion_length=1, limits={"max_response_tokens": 64, "max_tokens": 64}),
            "vocabulary": refused(client, vocabulary=300),
        }
    print(json.dumps(facts))


def policy(vocabulary: int) -> Any:
    """Return a policy of random weights; with a smaller vocabulary than the engine's, without special tokens."""
    torch.manual_seed(0)
    own = vocabulary == len(TOKENIZER)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=TOKENIZER.eos_token_id if own else None,
            pad_token_id=TOKENIZER.pad_token_id if own else None,
        )
    )


def trainer_of(client: Any, run: str, rate: float, seen: list[dict[str, Any]], **changed: Any) -> Any:
    """Return a trainer that records each step's call of the reward function."""

    def push(trainer: Any, engines: Any) -> None:
        seen.append({"pushed": [engine.url for engine in engines], "step": trainer.state.global_step})

    def length(completions: Any, farm_rollout_id: list[str], **rest: Any) -> list[float]:
        seen.append({"rewards": rest["farm_reward"], "ids": farm_rollout_id, "versions": rest["farm_version_max"]})
        return [0.0 for _ in completions]

    return GRPOTrainer(
        model=policy(changed.get("vocabulary", len(TOKENIZER))),
        processing_class=TOKENIZER,
        reward_funcs=[reward_from_farm, scored_only(length)],
        rollout_func=rollout_func(
            client, BY_PROMPT, run=run, push=push, max_attempts=1, limits=changed.get("limits", {})
        ),
        train_dataset=Dataset.from_dict({"prompt": [PROMPTS[name] for name in INSTANCES]}),
        args=GRPOConfig(
            output_dir=str(Path.cwd() / "out"),
            per_device_train_batch_size=N * len(INSTANCES),
            num_generations=N,
            max_steps=STEPS,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_completion_length=changed.get("max_completion_length", 64),
            temperature=0.9,
            top_p=0.95,
            top_k=50,
            repetition_penalty=1.05,
            save_strategy="no",
            learning_rate=rate,
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
    )  # fmt: skip


def trained(client: Any, run: str, rate: float) -> tuple[dict[str, Any], tuple[bool, list[float]]]:
    seen: list[dict[str, Any]] = []
    trainer = trainer_of(client, run, rate, seen)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    moved = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = [each for each in seen if "rewards" in each]
    scored = [[reward for reward in each["rewards"] if reward is not None] for each in steps]
    return {
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "rewards": [entry["reward"] for entry in logs],
        "clipped": [entry["completions/clipped_ratio"] for entry in logs],
        "farm_rewards": [sum(each) / len(each) for each in scored],
        "unscored": [each["rewards"].count(None) for each in steps],
        "versions": [sorted(set(each["versions"])) for each in steps],
        "rollout_ids": [each["ids"] for each in steps],
    }, (moved, [float(parameter.sum()) for parameter in after])


def advantages_of_a_mixed_group() -> list[float]:
    """Return TRL's advantages of a group with one broken member, by a rollout function of the farm's own rows."""
    rewards = [1.0, None, 0.5, 0.0]
    segments = [segment(3, [7, 7, 7], first_id=10 + 20 * number) for number in range(N)]
    group = [
        rollout(number, [each], reward=reward, outcome=Outcome.LOST if reward is None else Outcome.SUBMITTED)
        for number, (each, reward) in enumerate(zip(segments, rewards, strict=True))
    ]

    def constructed(prompts: Any, trainer: Any) -> dict[str, Any]:
        return _output(rows_of_step(group, pad_id=TOKENIZER.eos_token_id))

    trainer = GRPOTrainer(
        model=policy(2048),
        processing_class=TOKENIZER,
        reward_funcs=reward_from_farm,
        rollout_func=constructed,
        train_dataset=Dataset.from_dict({"prompt": [PROMPTS["a"]]}),
        args=GRPOConfig(
            output_dir=str(Path.cwd() / "out"), per_device_train_batch_size=N, num_generations=N, max_steps=1,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    return [float(value) for value in trainer._logs["advantages"]]


def refused(client: Any, **changed: Any) -> str:
    try:
        trainer_of(client, f"{RUN}-refused", 0.0, [], **changed).train()
    except InvalidRequest as error:
        return error.field
    return ""


main()

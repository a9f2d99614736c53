"""Train a model with TRL's GRPOTrainer and a farm's rollouts, in an environment with trl and the farm's client.

farm up                                                   # in a shell of its own, or a farm anywhere
VLLM_SERVER_DEV_MODE=1 vllm serve MODEL                   # dev mode lets weights be reloaded
farm engines add http://HOST:8000/v1
python examples/trainers/trl_grpo.py --farm http://HOST:8600 --model MODEL examples/problems.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import httpx2
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found, unused-ignore]
from trl import GRPOConfig, GRPOTrainer

import farm
from farm.adapters.trl import prompt_key, reward_from_farm, rollout_func


def main() -> None:
    options = read_options()
    instances = [farm.Instance.model_validate_json(line) for line in options.problems.read_text().splitlines()]
    # TRL needs a prompt for its logs and to tell problems apart; the farm's handler makes the policy's own prompt
    prompts = [[{"role": "user", "content": instance.instance_id}] for instance in instances]
    with farm.connect(options.farm) as client:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=reward_from_farm,
            rollout_func=rollout_func(
                client,
                {prompt_key(prompt): instance for prompt, instance in zip(prompts, instances, strict=True)},
                run=options.run,
                push=None if options.keep_weights else Pusher(options.out / "weights"),
                too_long="cut",
                limits=farm.Limits(max_turns=8, max_tokens=options.max_tokens),
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            args=GRPOConfig(
                output_dir=str(options.out),
                num_generations=options.samples,
                per_device_train_batch_size=options.samples * 2,
                max_completion_length=2 * options.max_tokens,
                max_steps=options.steps,
                learning_rate=1e-6,
                logging_steps=1,
                report_to=[],
                use_cpu=options.cpu,
                bf16=not options.cpu,
            ),
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, loss {entry['loss']:.4f}")


class Pusher:
    """Saves the policy's weights to a folder shared with the servers, and lets each vLLM server load them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, trainer: Any, engines: Any) -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self._folder)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder.resolve())}}
        for engine in engines:
            server = engine.url.removesuffix("/v1")
            httpx2.post(f"{server}/collective_rpc", json=reload, timeout=600).raise_for_status()
            httpx2.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with TRL on a farm.")
    parser.add_argument("problems", type=Path, help="instances, a line of JSON each")
    parser.add_argument("--farm", required=True, help="the farm's address")
    parser.add_argument("--model", required=True, help="a folder, or a name on a hub")
    parser.add_argument("--run", default="trl-example", help="the run's name: the same one continues its rollouts")
    parser.add_argument("--out", type=Path, default=Path("trl-out"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--keep-weights", action="store_true", help="push none, for engines that take none")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The same training with TRL's GRPOTrainer: the adapter supplies the farm's rollouts, the training loop is TRL's.

It runs in the trainers' environment (`tests/trainers/environment.sh`). TRL writes a checkpoint after each step. If it
is killed at any line and started again, it resumes from the newest complete checkpoint, and its batch of that step is
the one that was submitted before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import torch  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

import farm
from examples.training import reward_curve
from examples.training.file_chains import DATA_SOURCE, file_chains
from examples.training.turn_text import CONTEXT_TOKENS
from farm.adapters.trl import FarmRolloutFunc, reward_from_farm, rollout_func

_COLUMNS = ("n_rollouts", "n_unscored", "n_rows", "n_tokens", "largest_gap", "oldest_version", "newest_version")
_TIMES = ("rollout_s", "push_s")


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    instances = {
        f"step {step}, problem {index}": farm.Instance(data_source=DATA_SOURCE, fields=chain.fields)
        for step in range(1, options.steps + 1)
        for index, chain in enumerate(file_chains(options.seed, step, options.groups))
    }
    with farm.connect(options.farm) as client:
        pusher = StepWeights(options.folder / "weights")
        roll_out = rollout_func(
            client,
            instances,
            run=options.folder.name,
            push=pusher,
            mode="keep",
            sampling=farm.SamplingParams(temperature=1.0, max_tokens=12, seed=options.seed),
            limits=farm.Limits(max_turns=7, max_observation_chars=60),
            sandbox=options.sandbox,
            max_staleness=0,
            on_stale="restart",
        )
        measured = MeasuredRollouts(roll_out, pusher)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.policy),
            reward_funcs=measured.reward,
            rollout_func=measured,
            train_dataset=Dataset.from_dict({"prompt": list(instances)}),
            args=config(options),
            callbacks=[CurveWriter(options.folder)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=newest_checkpoint(options.folder))


def config(options: argparse.Namespace) -> Any:
    """Return TRL's options: a generation and an optimizer step for each farm batch, and a checkpoint after it."""
    return GRPOConfig(
        output_dir=str(options.folder),
        per_device_train_batch_size=options.groups * options.samples,
        num_generations=options.samples,
        max_completion_length=CONTEXT_TOKENS,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        seed=options.seed,
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )


class StepWeights:
    """Saves the weights of a step where the engines find them, and lets each vLLM server load them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.seconds = 0.0

    def __call__(self, trainer: Any, engines: Sequence[Any]) -> None:
        began = time.monotonic()
        weights = self._folder / str(trainer.state.global_step)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(weights)
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        for engine in engines:
            server = engine.url.removesuffix("/v1")
            httpx2.post(f"{server}/collective_rpc", json=load, timeout=120).raise_for_status()
            reset = f"{server}/reset_prefix_cache?reset_running_requests=true"
            httpx2.post(reset, timeout=120).raise_for_status()
        for older in self._folder.iterdir():
            if older != weights:
                shutil.rmtree(older)
        self.seconds = time.monotonic() - began


class MeasuredRollouts:
    """The farm's rollout function, and a reward function that adds the numbers of a step to TRL's log."""

    def __init__(self, roll_out: FarmRolloutFunc, pusher: StepWeights) -> None:
        self._roll_out = roll_out
        self._pusher = pusher
        self._row: dict[str, float] = {}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        began = time.monotonic()
        output = self._roll_out(prompts, trainer)
        seconds, push_s = time.monotonic() - began, self._pusher.seconds
        scored = [reward for reward in output["farm_reward"] if reward is not None]
        self._row = {
            "n_rollouts": len(prompts),
            "n_unscored": len(prompts) - len(scored),
            "n_rows": sum(any(mask) for mask in output["env_mask"]),
            "n_tokens": sum(map(sum, output["env_mask"])),
            "largest_gap": largest_gap(trainer, output),
            "oldest_version": min(version for version in output["farm_version_min"] if version >= 0),
            "newest_version": max(output["farm_version_max"]),
            "rollout_s": seconds - push_s,
            "push_s": push_s,
        }
        return output

    def reward(self, prompts: Any, completions: Any, *, log_metric: Any, **columns: Any) -> list[float | None]:
        """Return the farm's rewards; TRL logs the numbers of `log_metric` with the step."""
        for name, value in self._row.items():
            log_metric(f"farm/{name}", value)
        return list(reward_from_farm(prompts, completions, **columns))


def largest_gap(trainer: Any, output: Mapping[str, list[Any]]) -> float:
    """Return the largest difference between an engine's log-probability and the trainer's own, over sampled tokens."""
    rows = [[*prompt, *ids] for prompt, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = trainer.accelerator.unwrap_model(trainer.model)(input_ids=ids, attention_mask=there).logits
    ours = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    largest = 0.0
    for row, prompt, mask, logprobs in zip(
        ours, output["prompt_ids"], output["env_mask"], output["logprobs"], strict=True
    ):
        sampled = torch.tensor(mask) == 1
        begin = len(prompt) - 1
        gaps = (row[begin : begin + len(mask)] - torch.tensor(logprobs))[sampled].abs()
        largest = max(largest, float(gaps.max()) if len(gaps) else 0.0)
    return largest


class CurveWriter(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Prints each step and writes the table of all steps, from the log that TRL keeps in its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        rows = [_row(entry) for entry in state.log_history if "farm/n_rollouts" in entry]
        if rows and "farm/n_rollouts" in state.log_history[-1]:
            print(reward_curve.show(rows[-1]), flush=True)
            reward_curve.write_table(rows, self._folder)


def _row(entry: Mapping[str, float]) -> dict[str, float]:
    own = {name: entry[f"farm/{name}"] for name in (*_COLUMNS, *_TIMES)}
    step = int(entry["step"])
    return {
        "step": step,
        "reward": entry["reward"],
        **own,
        "train_s": entry["step_time"] - own["rollout_s"] - own["push_s"],
    }


def newest_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint; a killed trainer leaves one without its last file, or half of it."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for checkpoint in found:
        try:
            step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
        except (OSError, ValueError):
            shutil.rmtree(checkpoint)
            continue
        print(f"going on after step {step}", flush=True)
        return str(checkpoint)
    return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a policy on `follow the files` with TRL through a farm.")
    parser.add_argument("folder", type=Path, help="of the run: checkpoints, weights, curve; its name names the batches")
    parser.add_argument("--farm", required=True, help="the address of the farm, such as http://HOST:8600")
    parser.add_argument("--policy", type=Path, required=True, help="the folder of the model to begin with")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--mode", choices=("sync",), default="sync", help="GRPOTrainer trains on what it waited for")
    parser.add_argument("--groups", type=int, default=16, help="problems of a step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of a problem")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--sandbox", default="namespace")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""TRL's own generation and tool loop compared with the farm's: the same tokens become the same training batch.

`trl_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with its
tokenizer. The farm runs rollouts; their recorded calls are then the generations of the vLLM of a `GRPOTrainer` without
a rollout function, and the environment's replies are those of a tool of that trainer.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from recorded_episodes import (  # type: ignore[import-not-found]
    LONG,
    PLAIN,
    TOOL,
    N,
    Recording,
    differing,
    problem,
)
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

import farm
from farm.adapters.trl import prompt_key, reward_from_farm, rollout_func

URL, ENGINE, MODEL = sys.argv[1:4]


class _Generation:
    """The part of TRL's vLLM client that its trainer calls, for the samples of one prompt."""

    def __init__(self, recordings: list[Recording]) -> None:
        self.recordings = recordings
        self.llm = SimpleNamespace()

    def sync_weights(self) -> None:
        """Send nothing."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        calls = [each.answer(prompt) for each, prompt in zip(self.recordings, prompts, strict=True)]
        ids = [call.response_ids.tolist() for call in calls]
        return prompts, ids, [[[value] for value in call.response_logprobs.tolist()] for call in calls], None


def tokenizer(*, tools_in_prompt: bool) -> Any:
    """Return the tokenizer; the farm's problem has no tool in its prompt, so TRL's must render none."""
    made = AutoTokenizer.from_pretrained(MODEL)
    if not tools_in_prompt:
        made.chat_template = "{%- set tools = [] %}" + made.chat_template
        made.response_template = qwen3_template
    return made


def trainer_of(question: str, processing_class: Any, **named: Any) -> Any:
    torch.manual_seed(0)
    longest = named.pop("max_completion_length")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"eos_token_id": processing_class.eos_token_id, "pad_token_id": processing_class.pad_token_id}
    config = Qwen2Config(vocab_size=len(processing_class), num_key_value_heads=2, **size, **special)
    return GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        processing_class=processing_class,
        train_dataset=Dataset.from_dict({"prompt": [prompt(question)]}),
        args=GRPOConfig(
            output_dir=str(Path.cwd() / "out"),
            per_device_train_batch_size=N,
            num_generations=N,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_completion_length=longest,
            mask_truncated_completions=named.pop("mask_truncated_completions", False),
            max_tool_calling_iterations=named.pop("max_tool_calling_iterations", None),
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        **named,
    )


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def compared(client: Any, question: str, longest: int, **options: Any) -> dict[str, Any]:
    """Compare the two batches of a problem; `options` are arguments of TRL's configuration."""
    inputs = [{"prompt": prompt(question)} for _ in range(N)]
    seen: list[str] = []

    def noted(completions: Any, farm_rollout_id: list[str], **_: Any) -> list[float]:
        seen.extend(farm_rollout_id)
        return [0.0 for _ in completions]

    by_prompt = {prompt_key(prompt(question)): problem(question, ENGINE)}
    farm_rollouts = rollout_func(client, by_prompt, run=f"own-{longest}-{json.dumps(options)}", max_attempts=1)
    ours = trainer_of(
        question,
        tokenizer(tools_in_prompt=True),
        reward_funcs=[reward_from_farm, noted],
        rollout_func=farm_rollouts,
        max_completion_length=longest,
        **options,
    )
    # otherwise TRL has no importance sampling, see docs/reference/oracles.md
    ours.use_vllm, ours._last_loaded_step = True, ours.state.global_step
    batch = ours._generate_and_score_completions(inputs)
    recordings = [Recording(client.calls(rollout_id)) for rollout_id in seen]
    found = {each.rollout_id: each.reward for each in client.collect(seen[0].partition(".")[0])}
    rewards = [found[rollout_id] for rollout_id in seen]

    def look(at: str) -> str:
        """Look.

        Args:
            at: it
        """
        return str(recordings[0].observation())

    def scored(completions: Any, **_: Any) -> list[float]:
        return rewards

    def nothing(completions: Any, **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    own = trainer_of(
        question,
        tokenizer(tools_in_prompt=False),
        reward_funcs=[scored, nothing],
        tools=[look] if question == TOOL else None,
        max_completion_length=longest,
        **options,
    )
    own.use_vllm, own.vllm_mode, own._last_loaded_step = True, "server", -1
    own.vllm_generation = _Generation(recordings)
    theirs = own._generate_and_score_completions(inputs)
    mask = batch["tool_mask"][0]
    if own.tools == []:
        # TRL has no such mask without tools
        masked = options.get("mask_truncated_completions", False)
        assert masked or torch.equal(batch["tool_mask"], batch["completion_mask"])
        theirs["tool_mask"] = batch["tool_mask"]
    return {
        "differing": differing(batch, theirs),
        "names": sorted(theirs),
        "faults": [fault for recording in recordings for fault in recording.faults],
        "lengths": [len(list(each)) for _, each in groupby(mask[: int(batch["completion_mask"][0].sum())].tolist())],
        "rewards": rewards,
        "clipped": [each._metrics["train"]["completions/clipped_ratio"] for each in (ours, own)],
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    with farm.connect(URL) as client:
        facts = {
            "stop": compared(client, PLAIN, 48),
            "cut": compared(client, LONG, 4),
            "cut_and_masked": compared(client, LONG, 4, mask_truncated_completions=True),
            "tool": compared(client, TOOL, 200),
        }
        turn, observation, last = facts["tool"]["lengths"]
        facts |= {
            "cut_in_second_turn": compared(client, TOOL, turn + observation + last - 3),
            "one_left_after_tool": compared(client, TOOL, turn + observation + 1),
            "full_after_tool": compared(client, TOOL, turn + observation - 1),
            "exactly_full_after_tool": compared(client, TOOL, turn + observation),
            "cut_in_first_turn": compared(client, TOOL, turn - 1),
            "no_tool_turns": compared(client, TOOL, 200, max_tool_calling_iterations=0),
            "one_tool_turn": compared(client, TOOL, 200, max_tool_calling_iterations=1),
        }
    print(json.dumps(facts))


main()

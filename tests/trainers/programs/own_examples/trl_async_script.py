"""AsyncGRPOTrainer trains on the CPU, called as TRL's `examples/scripts/async_grpo.py` calls it:
`trl_async_script.py FARM_URL MODEL_TEXT`.

Two functions of TRL's need a GPU and are replaced: the name of the device that FLOPs are counted for, and the
attention of FlashAttention over packed rows, which is plain torch here. All other code is TRL's own.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from small_policy import write_policy  # type: ignore[import-not-found]
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

import farm
from farm.adapters.trl_worker import FarmRolloutWorker, FarmWeightTransfer

URL, MODEL_TEXT = sys.argv[1:]


def attention(
    query: Any, key: Any, value: Any, queries: Any, keys: Any, *_: Any, softmax_scale: float, **rest: Any
) -> Any:
    """Attend within each packed row, causally from its end, as `flash_attn_varlen_func` does."""
    result = torch.empty_like(query)
    each = query.shape[1] // key.shape[1]
    spans = zip(queries[:-1].tolist(), queries[1:].tolist(), keys[:-1].tolist(), keys[1:].tolist(), strict=True)
    for begin, end, first, last in spans:
        n_queries, n_keys = end - begin, last - first
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
        row = query[begin:end].transpose(0, 1)[None]
        context = [tensor[first:last].repeat_interleave(each, 1).transpose(0, 1)[None] for tensor in (key, value)]
        attended = torch.nn.functional.scaled_dot_product_attention(row, *context, attn_mask=seen, scale=softmax_scale)
        result[begin:end] = attended[0].transpose(0, 1)
    return result


def main() -> None:
    """Train three steps; print the pushed weights and TRL's log."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *words: None
    write_policy(MODEL_TEXT, "policy")
    pushed: list[dict[str, float]] = []

    def push(engines: Any, parameters: Any) -> None:
        sums = {name: float(tensor.double().sum()) for name, tensor in parameters}
        pushed.append({"engines": len(engines), "parameters": len(sums), "sum": sum(sums.values())})

    problems = [chat("a"), breaking("b"), chat("c")]
    config = AsyncGRPOConfig(
        output_dir="async_grpo", save_strategy="no", per_device_train_batch_size=8, gradient_accumulation_steps=2,
        num_generations=4, max_completion_length=64, max_steps=3, learning_rate=1e-2, report_to="none",
        logging_steps=1, token_budget=512, use_cpu=True, bf16=False, dtype="float32", disable_tqdm=True,
    )  # fmt: skip
    with farm.connect(URL) as client:
        worker = FarmRolloutWorker(client, problems, args=config, run="async-script", max_attempts=1)
        trainer = AsyncGRPOTrainer(
            model="policy",
            args=config,
            train_dataset=Dataset.from_list([{"prompt": problem.instance_id} for problem in problems]),
            rollout_worker=worker,
            weight_transfer=FarmWeightTransfer(client, push),
        )
        trainer.train()
        worker.stop()
        version = client.newest_version()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    facts = {
        "steps": [entry["step"] for entry in logs],
        "finite": all(math.isfinite(entry[name]) for entry in logs for name in ("loss", "grad_norm", "reward")),
        "rewards": [entry["reward"] for entry in logs],
        "pushed": pushed,
        "version": version,
        "model_version": trainer.model_version,
    }
    print(json.dumps(facts))


main()

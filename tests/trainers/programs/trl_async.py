"""TRL's own queue, batcher and packing of the samples that the farm's worker sends AsyncGRPOTrainer:
`trl_async.py FARM_URL`.

The trainer itself needs a GPU: it packs rows without padding for FlashAttention.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import islice
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from accelerate import PartialState  # type: ignore[import-not-found, unused-ignore]
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo import async_grpo_trainer as trl

import farm
from farm.adapters.trl_worker import FarmRolloutWorker, FarmWeightTransfer


def main(url: str) -> None:
    # the trainer makes it, and TRL's log needs it
    PartialState()
    pushed: list[tuple[int, int]] = []

    def push(engines: Any, parameters: Any) -> None:
        pushed.append((len(engines), sum(1 for _ in parameters)))

    problems = [chat("a"), breaking("b"), chat("c")]
    with farm.connect(url) as client:
        before = client.newest_version()
        transfer = FarmWeightTransfer(client, push)
        args = AsyncGRPOConfig("async", num_generations=4, max_inflight_tasks=8, use_cpu=True, bf16=False)
        worker = FarmRolloutWorker(client, problems, args=args, run="async", max_attempts=1)
        # in the order of the trainer's own _sync_weight
        transfer.init_weight_transfer()
        transfer.pause()
        transfer.send_weights(iter([("weight", torch.zeros(1))]))
        transfer.resume()
        worker.update_model_version(1)
        worker.start()
        metrics: dict[str, list[Any]] = defaultdict(list)
        queue = trl.RolloutQueueDataset(
            worker.rollout_buffer, lambda: 1, worker.check_health, 120.0, metrics, max_staleness=0
        )
        rows = list(islice(iter(queue), 12))
        worker.stop()
        dropped = filtered(client)
        batches = list(trl.FixedCountBatcher(rows, 1, 4))
        collator = trl.DataCollatorForRollout(0, 1)
        packed = [collator.torch_call([batch]) for batch in batches]
        facts = {
            "before": before,
            "version": client.newest_version(),
            "pushed": pushed,
            "rows": len(rows),
            "lengths": all(
                len(row["input_ids"]) == len(row["completion_mask"]) == len(row["old_log_probs"]) for row in rows
            ),
            "groups": sorted({row["group_id"] % len(problems) for row in rows}),
            "unscored": sum(metric["farm/n_unscored_total"] for metric in drained(worker.metrics_queue)) > 0,
            "stale": len(metrics["sample/dropped_stale_total"]),
            "packed": all(bool(value.isfinite().all()) for each in packed for value in tensors(each)),
            "trained_groups": len(collator.groups_trained),
            "filtered": dropped,
        }
    print(json.dumps(facts))


def filtered(client: Any) -> dict[str, float]:
    """Run an instance whose samples are all wrong, with random ones, and drop groups of equal rewards."""
    wrong = chat("never").model_copy(update={"fields": {"question": "How many hops?", "expected": "nine"}})
    args = AsyncGRPOConfig("filtered", num_generations=4, max_inflight_tasks=4, use_cpu=True, bf16=False)
    worker = FarmRolloutWorker(client, [chat("a"), wrong], args=args, run="filtered", filter_groups="drop")
    worker.start()
    counts: dict[str, float] = defaultdict(float)
    rewards: dict[int, list[float]] = defaultdict(list)
    while len(rewards) < 2 or "farm/n_dropped_equal_rewards_total" not in counts:
        worker.check_health(120.0)
        row = worker.rollout_buffer.get(timeout=120.0)
        rewards[row.group_id].append(row.metrics["reward"])
        for metric in drained(worker.metrics_queue):
            for name, value in metric.items():
                counts[name] += value
    worker.stop()
    # the last one may be incomplete
    whole = [each for each in rewards.values() if len(each) == 4]
    return {"equal": sum(len(set(each)) < 2 for each in whole), "of_never": sum(group % 2 for group in rewards)}


def drained(queue: Any) -> list[dict[str, float]]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def tensors(values: Any) -> list[Any]:
    found = values.values() if isinstance(values, dict) else []
    return [each.float() for each in found if isinstance(each, torch.Tensor)]


main(sys.argv[1])

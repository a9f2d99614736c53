"""AsyncGRPOTrainer's own worker compared with the farm's: equal tokens become equal samples and packed rows.

`trl_async_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with
its tokenizer. The farm runs rollouts; their recorded calls are then the answers of a server of vLLM's `/v1/completions`
to TRL's own `AsyncRolloutWorker`. TRL's queue, its batchers and its collator then take the samples of both. The loop of
TRL's worker runs in a separate process in one case, and in a thread in the others.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from accelerate import PartialState  # type: ignore[import-not-found, unused-ignore]
from datasets import Dataset
from recorded_episodes import (  # type: ignore[import-not-found]
    LONG,
    PLAIN,
    SPACED,
    TOOL,
    N,
    Recording,
    differing,
    of_two_rewards,
    other_sampling,
    problem,
)
from recorded_server import served  # type: ignore[import-not-found]
from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker

import farm
from farm.adapters.trl_worker import FarmRolloutWorker
from farm.records.rollout import Group

URL, ENGINE, MODEL = sys.argv[1:4]
SAID = "OWN_LOOPS_SAID"
"""The variable with the tool's replies, for a loop in a separate process."""
VERSION = 7
OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
}
SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ARRAYS = ("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id")


def look(at: str) -> str:
    """Look.

    Args:
        at: it
    """
    return os.environ[SAID]


def scored(rewards: Sequence[float], completions: Any, **_: Any) -> Sequence[float]:
    """Return the farm's rewards: TRL's loop runs one rollout at a time here, in the order of the farm's."""
    return rewards


class _Completions:
    """The part of vLLM's server that TRL's worker calls; each time the first prompt comes, it advances to a recording.

    After the last one it starts again, since the worker runs until it is stopped.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._first = list(recordings)
        self._waiting: list[Recording] = []
        self._passes = 0
        self._current = recordings[0]
        self._start = recordings[0].calls[0].prompt_ids.tolist()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's answer to a request for a completion of token ids."""
        if asked["prompt"] == self._start:
            if not self._waiting:
                self._passes += 1
                self._waiting = self._first if self._passes == 1 else [Recording(each.calls) for each in self._first]
                self._waiting = list(self._waiting)
            self._current = self._waiting.pop(0)
        if self._passes != 1:
            time.sleep(0.2)
        call = self._current.answer(asked["prompt"], asked)
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        logprobs = {"token_logprobs": call.response_logprobs.tolist()}
        ids = call.response_ids.tolist()
        return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": call.finish_reason}]}


class _Thread(threading.Thread):
    """The part of a process that TRL's worker uses."""

    exitcode, pid, _popen = 1, 0, True

    def terminate(self) -> None:
        raise AssertionError("TRL's loop did not end")


def own_worker(args: Any, question: str, rewards: Sequence[float], url: str, *, in_process: bool) -> Any:
    """Return TRL's own worker, with the arguments that AsyncGRPOTrainer gives it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # the farm's problem has no tool in its prompt
    tokenizer.chat_template = "{%- set tools = [] %}" + tokenizer.chat_template
    tokenizer.response_template = qwen3_template
    async_rollout_worker.is_vllm_available = lambda: True
    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name="policy",
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": question}]]}),
        reward_funcs=[partial(scored, list(rewards))],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        tools=[look] if question in (TOOL, SPACED) else None,
        num_generations=args.num_generations,
        max_inflight_tasks=args.max_inflight_tasks,
        queue_maxsize=args.queue_maxsize,
        vllm_server_url=url,
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        request_timeout=args.request_timeout,
        chat_template_kwargs=args.chat_template_kwargs,
        max_tool_calling_iterations=args.max_tool_calling_iterations,
        fork_threshold_tokens=args.fork_threshold_tokens,
    )
    if not in_process:
        worker._mp_ctx = SimpleNamespace(Process=_Thread)
    return worker


def taken(args: Any, worker: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return a group's samples, and the micro-batches that TRL makes of them."""
    samples = [worker.rollout_buffer.get(timeout=120.0) for _ in range(N)]
    worker.stop()
    again: queue.Queue[Any] = queue.Queue()
    for sample in samples:
        again.put(sample)
    metrics: dict[str, list[Any]] = defaultdict(list)
    source = async_grpo_trainer.RolloutQueueDataset(
        again, lambda: VERSION, worker.check_health, 120.0, metrics, max_staleness=0
    )
    rows = list(islice(iter(source), N))
    batcher: Any = async_grpo_trainer.FixedCountBatcher(rows, 1, N)
    if args.token_budget > 0:
        # TRL closes a micro-batch when a row arrives that does not fit
        full = np.ones(args.token_budget, np.int64)
        last = {"input_ids": full, "completion_mask": full, "group_id": -1}
        batcher = async_grpo_trainer.TokenBudgetBatcher([*rows, last], 1, args.token_budget, metrics)
    collator = async_grpo_trainer.DataCollatorForRollout(0, 1)
    return samples, [collator.torch_call([batch]) for batch in batcher]


def values_of(samples: Sequence[Any], batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays of samples and of micro-batches by name."""
    found: dict[str, Any] = {}
    for place, sample in enumerate(samples):
        for name in ARRAYS:
            value = getattr(sample, name)
            found[f"{name} {place}"] = (str(value.dtype), value.tolist()) if hasattr(value, "dtype") else value
        found |= {f"{name} {place}": sample.metrics[name] for name in ("reward", "reward_std")}
    return found | {
        f"packed {name} {place}": tensor for place, batch in enumerate(batches) for name, tensor in batch.items()
    }


def compared(
    client: Any, question: str, *, in_process: bool = False, token_budget: int = 0, **options: Any
) -> dict[str, Any]:
    """Compare the samples of a group; `options` are arguments of TRL's configuration."""
    args = AsyncGRPOConfig(
        "async",
        num_generations=N,
        max_inflight_tasks=1,
        queue_maxsize=N,
        token_budget=token_budget,
        use_cpu=True,
        bf16=False,
        **options,
    )
    groups: list[Group] = []

    def noted(group: Group) -> bool:
        groups.append(group)
        return True

    run = "own"
    ours = FarmRolloutWorker(client, [problem(question, ENGINE)], args=args, run=run, accept=noted, max_attempts=1)
    ours.update_model_version(VERSION)
    ours.start()
    our_samples, our_batches = taken(args, ours)
    recordings = [Recording(client.calls(rollout.rollout_id)) for rollout in groups[0].rollouts]
    rewards = [float(rollout.reward or 0.0) for rollout in groups[0].rollouts]
    said = recordings[0].calls[0].observations
    os.environ[SAID] = str(said[0]["content"]) if said else ""
    with served({"/v1/completions": _Completions(recordings).answer}) as url:
        worker = own_worker(args, question, rewards, url, in_process=in_process)
        worker.update_model_version(VERSION)
        worker.start()
        samples, batches = taken(args, worker)
    one, other = values_of(our_samples, our_batches), values_of(samples, batches)
    mask = samples[0].completion_mask.tolist()
    return {
        "differing": sorted({name.rpartition(" ")[0] for name in differing(one, other)}),
        "names": sorted({name.rpartition(" ")[0] for name in other}),
        "faults": [fault for recording in recordings for fault in recording.faults],
        "sampling": other_sampling(recordings, SAMPLED),
        "lengths": [len(list(each)) for _, each in groupby(mask)][1:],
        "n_tokens": len(mask),
        "n_trained": [int(side[0].completion_mask.sum()) for side in (our_samples, samples)],
        "rewards": rewards,
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    # the trainer makes it, and TRL's log needs it
    PartialState()
    with farm.connect(URL) as client:
        facts = {
            "stop": of_two_rewards(partial(compared, client, PLAIN, in_process=True, max_completion_length=48)),
            "stop_packed": of_two_rewards(partial(compared, client, PLAIN, max_completion_length=48, token_budget=64)),
            "cut": compared(client, LONG, max_completion_length=4),
            "sampled": compared(client, PLAIN, max_completion_length=48, **OTHER_SAMPLING),
            "tool": compared(client, TOOL, max_completion_length=200),
            "spaced": compared(client, SPACED, max_completion_length=200),
        }
        turn = facts["tool"]["lengths"][0]
        longest = facts["tool"]["n_tokens"]
        facts |= {
            "call_without_end": compared(client, TOOL, max_completion_length=turn - 1),
            "cut_call": compared(client, TOOL, max_completion_length=turn // 2),
            "no_tool_turns": compared(client, TOOL, max_completion_length=200, max_tool_calling_iterations=0),
            "one_tool_turn": compared(client, TOOL, max_completion_length=200, max_tool_calling_iterations=1),
            "just_the_budget": compared(client, TOOL, max_completion_length=200, token_budget=longest),
            "over_the_budget": compared(client, TOOL, max_completion_length=200, token_budget=longest - 3),
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

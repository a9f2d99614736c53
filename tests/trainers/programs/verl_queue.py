"""verl's V1 rows in a real TransferQueue, compared with those of verl's own worker: `verl_queue.py FARM_URL`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch  # type: ignore[import-not-found, unused-ignore]
import transfer_queue as tq
from omegaconf import OmegaConf
from problems_of_tests import breaking, chat  # type: ignore[import-not-found]
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu

import farm
from examples.trainers.verl_farm import Manager
from farm.adapters.conformance import adapter_promises as constructed
from farm.adapters.single_row import rows_of_step
from farm.adapters.verl import output_fields
from farm.adapters.verl_agent_loops import _PromptWriter, agent_loop_output
from farm.records.rollout import Outcome

N = 3
STEP = 5
UIDS = ["u0", "u1", "u2"]


def rollout_config() -> SimpleNamespace:
    values = SimpleNamespace(n=1, temperature=0.0, top_p=1.0, top_k=-1)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "val_kwargs": values}
    return SimpleNamespace(n=N, prompt_length=64, response_length=48, enable_rollout_routing_replay=True, **sampling)


CONFIG = SimpleNamespace(
    trainer=SimpleNamespace(project_name="farm", experiment_name="queue"),
    actor_rollout_ref=SimpleNamespace(rollout=rollout_config(), model=SimpleNamespace(path="model")),
)


class _Manager(Manager):
    connect = staticmethod(lambda: farm.connect(sys.argv[1]))  # type: ignore[assignment]
    run = ""
    settings = {"max_attempts": 1}  # noqa: RUF012


def main() -> None:
    # few enough that all of its actors are placed on any machine
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
    tq.init(OmegaConf.create({"backend": storage}))
    Path("model").mkdir()
    form = {"num_hidden_layers": 2, "num_experts_per_tok": 4, "num_experts": 300}
    Path("model", "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **form}))
    try:
        manager = _Manager.create(config=CONFIG, llm_client=None)
        batch = prompts()
        tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP} for _ in UIDS]
        tq.kv_batch_put(keys=UIDS, partition_id="train", tags=tags)
        returned = manager.generate_sequences(batch)
        buffer = settled()
        keys = sorted(buffer.partitions["train"])
        ours = rows(keys)
        theirs = rows(written_by_verl(manager))
        facts = {
            "returned": returned,
            "finished": sorted(buffer.finished_keys["train"]),
            "failed": sorted(buffer.failure_keys["train"]),
            "keys": keys,
            "tags": sorted({name for tag in buffer.partitions["train"].values() for name in tag}),
            "steps": sorted({tag["global_steps"] for tag in buffer.partitions["train"].values()}),
            "fields": [sorted(ours), sorted(theirs)],
            "types": {name: str(value.dtype) for name, value in ours.items() if isinstance(value, torch.Tensor)},
            "same_types": all(
                value.dtype == theirs[name].dtype for name, value in ours.items() if isinstance(value, torch.Tensor)
            ),
            "experts": [
                [ids.tolist(), of_ids.tolist()]
                for ids, of_ids in zip(ours["input_ids"].unbind(), ours["routed_experts"].unbind(), strict=True)
            ],
            "scores": [float(row.sum()) for row in ours["rm_scores"].unbind()],
            "one_survivor": one_survivor(manager),
            "on_the_last_token": all(float(row[-1]) == float(row.sum()) for row in ours["rm_scores"].unbind()),
        }
        print(json.dumps(facts))
    finally:
        tq.close()
        ray.shutdown()


def prompts() -> Any:
    """A batch as verl's V1 trainer dispatches it."""
    instances = [chat("a"), breaking("b"), chat("c")]
    batch = tu.get_tensordict(
        {
            "uid": np.array(UIDS, dtype=object),
            "raw_prompt": np.array([[{"role": "user", "content": uid}] for uid in UIDS] + [None], dtype=object)[:3],
            "farm_instance": np.array([each.model_dump_json() for each in instances], dtype=object),
            "index": torch.arange(3),
            "agent_name": np.array(["farm"] * 3, dtype=object),
        }
    )
    tu.assign_non_tensor_data(batch, "global_steps", STEP)
    return batch


def one_survivor(manager: Any) -> dict[int, list[Any]]:
    """Return the rows written of groups with too few scored rollouts, by the number of those: keys and statuses."""
    row = {"uid": "", "raw_prompt": [], "farm_instance": "{}", "index": torch.tensor(0), "global_steps": STEP}
    written: dict[int, list[Any]] = {}
    for n_scored in range(N + 1):
        uid = f"survivors-{n_scored}"
        writer = _PromptWriter("train", [{**row, "uid": uid}], [N])
        writer.begin()
        for number in range(N):
            scored = constructed.rollout(number, [constructed.segment(2, [1, 1])])
            broken = replace(scored, outcome=Outcome.ENGINE_ERROR, reward=None)
            writer.take(number, scored if number < n_scored else broken, partial(manager._rows, validate=True))
        found = tq.kv_list(partition_id="train")["train"]
        mine = {key: tag for key, tag in found.items() if key.startswith(uid)}
        written[n_scored] = [mine[uid]["status"], sorted(key for key in mine if key != uid)]
    return written


def settled() -> Any:
    """Wait until no prompt is in progress, and return verl's replay buffer with them."""
    buffer = ReplayBuffer("sync", None, 8, "drop", None)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        buffer._sync_metadata_from_transfer_queue()
        if not buffer.pending_keys["train"] | buffer.running_keys["train"]:
            return buffer
        time.sleep(0.1)
    raise TimeoutError("prompts are still under way")


def rows(keys: list[str]) -> dict[str, Any]:
    return dict(tq.kv_batch_get(keys=keys, partition_id="train").items())


def written_by_verl(manager: Any) -> list[str]:
    """Let verl's own worker write rows of the same rollouts with other keys; return these."""
    rollouts = manager.client.collect(manager.client.recent(1)[0])
    step_rows = [row for row in rows_of_step(rollouts) if row.scored]
    worker_class = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = worker_class.__new__(worker_class)
    worker.processor, worker.reward_loop_worker_handles, worker.distillation_enabled = None, None, False
    fields = {"uid": "v", "raw_prompt": [], "farm_instance": "{}", "index": torch.tensor(0), "global_steps": STEP}

    async def write() -> None:
        for session, row in enumerate(step_rows):
            outputs = [agent_loop_output(output_fields(row.rollout, each, row.reward)) for each in row.segments]
            await worker._agent_loop_postprocess(outputs, False, session_id=session, **fields)

    asyncio.run(write())
    return [f"v_{session}_0" for session in range(len(step_rows))]


main()

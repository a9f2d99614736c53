"""prime-rl's complete orchestrator trains three steps on rollouts of a farm.

`prime_rl_orchestrator.py FARM_URL ENGINE MODEL PRIME_RL`: MODEL, the name of the model, is the folder of its tokenizer.
Its trainer, which needs a GPU, is faked: it names weights after each step and receives the micro-batches with
prime-rl's receiver. Packages for GPUs that the orchestrator imports are empty modules.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar

import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]
from absent_modules import leave_out  # type: ignore[import-not-found]

import farm
from farm.adapters.verifiers.env_server import FarmEnvServer
from farm.client.gathered_rollouts import GatheredRollouts

URL, ENGINE, MODEL, SOURCE = sys.argv[1:5]
sys.path[:0] = [f"{SOURCE}/packages/prime-rl-configs/src", f"{SOURCE}/src"]
leave_out("torchtitan", "torchao", "vllm", "pynvml", "modelexpress", "grpc")
leave_out("wandb", "wandb_workspaces", "wandb_gql", "prime_evals", "prime_cli", "aiolimiter", "uvloop")
leave_out("prime_rl.trainer.models", first=True)

from prime_rl.configs.orchestrator import OrchestratorConfig  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.orchestrator import Orchestrator  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.transports.rollouts.filesystem import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    FileSystemMicroBatchReceiver,
)

NAME = "orchestrated"
STEPS = 3
N = 4


class OrchestratedTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):  # type: ignore[misc, unused-ignore]
    """One problem, repeated."""

    INFINITE: ClassVar[bool] = True

    def load(self) -> Any:
        while True:
            yield vf.Task(vf.TaskData(prompt="How many hops?"))


def instance_of(data: dict[str, Any]) -> farm.Instance:
    """Return the instance of the problem."""
    return farm.Instance(data_source="chat", fields={"question": data["prompt"], "expected": "three"})


def configured(address: str) -> Any:
    """Return the configuration of the orchestrator."""
    env = {"taskset": {"id": NAME}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    source = {"name": NAME, "env": env, "serve": {"address": address}}
    written = {
        "model": {"name": MODEL, "client": {"base_url": ENGINE, "api_key_var": "ORCHESTRATED_KEY"}},
        "batch_size": 2 * N,
        "group_size": N,
        "seq_len": 512,
        "max_steps": STEPS,
        "renderer": {"name": "default"},
        "train": {"sampling": {"max_completion_tokens": 48}, "source": [source]},
        "eval": {"interval": 2, "num_examples": 2, "source": [source | {"name": "evaluated"}]},
        "rollout_transport": {"type": "filesystem"},
        "weight_broadcast": {"type": "filesystem"},
        "output_dir": "outputs",
    }
    return OrchestratorConfig.model_validate(written)


def episodes(output: Path, kind: str, subset: str) -> list[dict[str, Any]]:
    """Return the episodes that prime-rl recorded."""
    files = sorted(output.glob(f"rollouts/step_*/{kind}/{subset}/traces.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def train(output: Path, taken: list[dict[str, int]]) -> None:
    """Act as the trainer: name weights, receive the micro-batches of each step, and record their contents."""
    receiver = FileSystemMicroBatchReceiver(output, 0, 1)
    for step in range(STEPS):
        weights = output / "broadcasts" / f"step_{step}"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "STABLE").touch()
        receiver.wait()
        batches = receiver.receive()
        taken.append(
            {
                "micro_batches": len(batches),
                "tokens": sum(len(each.input_ids) for each in batches),
                "trained": sum(map(sum, (each.loss_mask for each in batches))),
                "credited": sum(value != 0 for each in batches for value in each.advantages),
            }
        )


async def main() -> dict[str, Any]:
    """Run the orchestrator to its end; return the micro-batches of its trainer and the farm's rollouts."""
    os.environ["ORCHESTRATED_KEY"] = "EMPTY"
    module = ModuleType(NAME)
    module.OrchestratedTaskset, module.__all__ = OrchestratedTaskset, ["OrchestratedTaskset"]  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    client = farm.connect(URL)
    rollouts = GatheredRollouts(client)
    server = FarmEnvServer(rollouts, "tcp://127.0.0.1:0", instance=instance_of, request={"max_attempts": 1})
    serving = asyncio.create_task(server.run())
    config = configured(server.address)
    taken: list[dict[str, int]] = []
    trainer = Thread(target=train, args=(config.output_dir, taken), daemon=True)
    trainer.start()
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    await asyncio.to_thread(trainer.join, 60)
    serving.cancel()
    await serving
    await asyncio.to_thread(rollouts.close)
    await asyncio.to_thread(client.close)
    return {
        "steps": taken,
        "progress": orchestrator.progress.step,
        "version": orchestrator.policy.version,
        "failed": sum(not each["ok"] for each in episodes(config.output_dir, "train", "all")),
        "evaluated": [each["traces"][0]["ok"] for each in episodes(config.output_dir, "eval", "effective")],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))

"""Runs tasks on the farm like rLLM: by its own engine, its own model gateway and its own grouping of episodes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import rllm  # type: ignore[import-not-found, unused-ignore]
from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]

# the gateway is a separate package in rLLM's repository
sys.path.insert(0, str(Path(rllm.__file__).parents[1] / "rllm-model-gateway" / "src"))

from rllm.engine.remote_agent_flow_engine import (  # type: ignore[import-not-found, unused-ignore]
    RemoteAgentFlowEngine,
)
from rllm.engine.remote_runtime import (  # type: ignore[import-not-found, unused-ignore]
    RemoteRuntimeConfig,
    TaskSubmission,
    create_remote_runtime,
)
from rllm.gateway.manager import GatewayManager  # type: ignore[import-not-found, unused-ignore]
from rllm.trainer.algorithms.config import (  # type: ignore[import-not-found, unused-ignore]
    CompactFilteringConfig,
    TransformConfig,
)
from rllm.trainer.algorithms.transform import (  # type: ignore[import-not-found, unused-ignore]
    transform_episodes_to_trajectory_groups,
)
from rllm.trainer.unified_trainer import UnifiedTrainer  # type: ignore[import-not-found, unused-ignore]
from rllm.workflows.workflow import TerminationReason  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.rllm import FarmRuntime, use_runtime


class VerlEngine:
    """The part of rLLM's engine of that name that its gateway reads: the addresses of the inference servers."""

    train_sampling_params: dict[str, Any] = {"temperature": 0.7}  # noqa: RUF012
    val_sampling_params: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, address: str) -> None:
        self.server_addresses = [address]


def gateway_on(engine: VerlEngine, model: str) -> GatewayManager:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = OmegaConf.create({"rllm": {"gateway": {"host": "127.0.0.1", "port": port}}, "model": {"name": model}})
    gateway = GatewayManager(config, mode="thread")
    gateway.start(engine)
    return gateway


def is_used(runtime: FarmRuntime, gateway: GatewayManager) -> bool:
    """Put a runtime into a trainer like rLLM's constructor, without its backend; return True if it is used."""
    named = create_remote_runtime(RemoteRuntimeConfig(enabled=True))
    trainer = object.__new__(UnifiedTrainer)
    trainer._remote_runtime = named
    trainer.agent_workflow_engine = RemoteAgentFlowEngine(runtime=named, gateway=gateway)
    # the filter of rLLM's own default configuration
    default = OmegaConf.load(Path(rllm.__file__).parent / "trainer/config/rllm/base.yaml").compact_filtering
    trainer.cf_config = filtering = CompactFilteringConfig.from_config(default)
    assert not filtering.should_mask(TerminationReason.ERROR)
    use_runtime(trainer, runtime)
    masked = {reason.name for reason in TerminationReason if filtering.should_mask(reason)}
    assert masked == {"ERROR"}, masked
    assert trainer.cf_config is filtering
    return trainer._remote_runtime is runtime and trainer.agent_workflow_engine.runtime is runtime


def step_of(step: Any) -> dict[str, Any]:
    return {"prompt_ids": step.prompt_ids, "response_ids": step.response_ids, "logprobs": step.logprobs}


async def run_episodes(given: dict[str, Any]) -> dict[str, Any]:
    gateway = gateway_on(VerlEngine(given["worker"]), given["model"])
    runtime = FarmRuntime(given["farm"], request={"max_attempts": 1}, model=given["model"])
    runtime.initialize()
    engine = RemoteAgentFlowEngine(runtime=runtime, gateway=gateway, session_timeout=120.0, n_parallel_tasks=16)
    try:
        episodes = await engine.execute_tasks(given["tasks"], given["task_ids"])
        groups, _ = transform_episodes_to_trajectory_groups(
            episodes, TransformConfig(), CompactFilteringConfig(enable=True, mask_error=True)
        )
        late = TaskSubmission(given["slow"], "late", "late", "http://127.0.0.1:9/v1")
        wrong = TaskSubmission({"question": "?"}, "wrong", "wrong", "http://127.0.0.1:9/v1")
        no_address = TaskSubmission(given["slow"], "no address", "no address", "nowhere")
        results = await runtime.execute_tasks([late, wrong, no_address], timeout=3.0)
        # as submitted by versions of rLLM whose gateway has a key for each session
        keyed = TaskSubmission(given["tasks"][0], "keyed", "keyed", given["keyed_url"])
        keyed.inference_api_key = given["key"]
        results += await runtime.execute_tasks([keyed])
    finally:
        runtime.shutdown()
        await asyncio.to_thread(gateway.stop)
    return {
        "used": is_used(runtime, gateway),
        "episodes": [
            {
                "id": episode.id,
                "reason": episode.termination_reason.name,
                "rewards": [trajectory.reward for trajectory in episode.trajectories],
                "steps": [step_of(step) for trajectory in episode.trajectories for step in trajectory.steps],
                "metadata": episode.metadata,
            }
            for episode in episodes
        ],
        "groups": {group.group_id: [each.reward for each in group.trajectories] for group in groups},
        "results": [
            {"finished": r.finished, "reward": r.reward, "reason": r.termination_reason.name, "error": r.error}
            for r in results
        ],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run_episodes({"farm": sys.argv[1]} | json.loads(sys.argv[2])))))

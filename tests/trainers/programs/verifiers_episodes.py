"""Runs rollouts through verifiers' own client, on the farm's env server, and reads them by verifiers' own types."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from verifiers.v1.configs.client import (  # type: ignore[import-not-found, unused-ignore]
    EvalClientConfig,
    TrainClientConfig,
)
from verifiers.v1.episode import WireEpisode  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.client import EnvClient  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.types import BaseRequest, BaseResponse  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.task import Task, TaskData  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.trace import WireTrace  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found, unused-ignore]

import farm
from farm.adapters.verifiers.env_server import FarmEnvServer
from farm.client.gathered_rollouts import GatheredRollouts

LATE_S = 3.3
"""Seconds from the start of the client to that of its server: several probes wait for it then."""


class FarmTaskData(TaskData):  # type: ignore[misc, unused-ignore]
    """A row of a taskset for the farm."""

    data_source: str
    fields: dict[str, Any]


class FarmTask(Task[FarmTaskData]):  # type: ignore[misc, unused-ignore]
    """A task that the farm runs and scores."""


class Juggle(BaseRequest):  # type: ignore[misc, unused-ignore]
    """A request that no server knows."""

    method: ClassVar[str] = "juggle"


def trace_of(trace: WireTrace) -> dict[str, Any]:
    return {
        "ok": trace.ok,
        "completed": trace.is_completed,
        "stop": trace.stop_condition,
        "timeout": getattr(trace, "is_timeout", None),
        "errors": [{"type": error.type, "message": error.message} for error in trace.errors],
        "reward": trace.reward,
        "rewards": {name: reward and reward.value for name, reward in trace.rewards.items()},
        "task": [trace.task.type, trace.task.key],
        "farm": trace.info["farm"],
        "roles": [node.message.role for node in trace.nodes],
        "usage": [[call.usage.input_tokens, call.usage.completion_tokens] for call in trace.calls],
        "seconds": [trace.timing.agent.duration, trace.timing.scoring.duration],
        "branches": [
            {
                "token_ids": branch.token_ids,
                "mask": branch.sampled_mask,
                "logprobs": branch.logprobs,
                "trainable": getattr(branch, "trainable", True),
                "experts": None if branch.routed_experts is None else branch.routed_experts.tolist(),
                "last": branch.messages[-1].content,
            }
            for branch in trace.branches
        ],
    }


def episode_of(episode: WireEpisode) -> dict[str, Any]:
    # once more through the record that verifiers writes to disk
    again = WireEpisode.model_validate(json.loads(json.dumps(episode.to_record())))
    assert [trace.num_turns for trace in again.traces] == [trace.num_turns for trace in episode.traces]
    (trace,) = episode.traces
    return {"ok": episode.ok, "env": episode.env.id} | trace_of(trace)


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def leave(given: dict[str, Any], address: str, client: Any) -> None:
    """Disconnect during a rollout, without a cancel: its answer is not received."""
    leaving = EnvClient(address)
    data = FarmTaskData(**given["chat"]).model_dump(mode="json")
    left = asyncio.create_task(leaving.run(client, given["model"], SamplingConfig(), data))
    await asyncio.sleep(0.1)
    await leaving.close()
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left


async def by_command(given: dict[str, Any], client: Any, release: str) -> dict[str, Any]:
    """Run a task on the server as a trainer starts it, with the verifiers of a folder; `""` is the installed one."""
    command = (sys.executable, "-m", "farm.adapters.verifiers", "--address", "tcp://127.0.0.1:0")
    options = (
        "--farm",
        given["farm"],
        "--request",
        given["request_file"],
        "--instance",
        "verifiers_episodes:instance_of",
        "--routed-experts",
        str(given["routed_experts"]),
    )
    of_client = given["release"].split(os.pathsep)
    own = [each for each in os.environ["PYTHONPATH"].split(os.pathsep) if each not in of_client]
    paths = os.pathsep.join(each for each in (*own, release, str(Path(__file__).parent)) if each)
    env = os.environ | {"PYTHONPATH": paths}
    server = await asyncio.create_subprocess_exec(*command, *options, env=env, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    verifiers = EnvClient((await server.stdout.readline()).decode().strip())
    try:
        await verifiers.wait_for_server_startup()
        data = TaskData(prompt=given["chat"]["fields"]["question"]).model_dump(mode="json")
        return episode_of(await verifiers.run(client, given["model"], SamplingConfig(), data))
    finally:
        await verifiers.close()
        server.send_signal(signal.SIGINT)
        assert await server.wait() == 0


def instance_of(task_data: dict[str, Any]) -> farm.Instance:
    """Return the instance of a task that has only a prompt."""
    return farm.Instance(data_source="chat", fields={"question": task_data["prompt"], "expected": "three"})


async def run_episodes(given: dict[str, Any]) -> dict[str, Any]:
    os.environ["TRAINER_KEY"] = given["engine_key"]
    client = farm.connect(given["farm"])
    rollouts = GatheredRollouts(client)
    address = f"tcp://127.0.0.1:{free_port()}"
    # a client calls before the server exists, like one that is started with it
    verifiers = EnvClient(address)
    started = asyncio.create_task(verifiers.wait_for_server_startup())
    await asyncio.sleep(LATE_S)
    top_k = given["routed_experts"]
    server = FarmEnvServer(rollouts, address, request={"max_attempts": 1}, routed_experts=top_k)
    serving = asyncio.create_task(server.run())
    endpoint = {"base_url": given["engine_url"], "api_key_var": "TRAINER_KEY"}
    train, plain = TrainClientConfig(**endpoint), EvalClientConfig(**endpoint)

    async def run(task: Mapping[str, Any], client: Any = train, **sampling: Any) -> dict[str, Any]:
        data = FarmTaskData(**task)
        config = SamplingConfig(temperature=0.9, **sampling)
        try:
            episode = await verifiers.run(client, given["model"], config, data.model_dump(mode="json"))
        except RuntimeError as refused:
            return {"refused": str(refused)}
        return episode_of(episode) | {"hash": FarmTask(data).hash}

    try:
        await started
        episodes = await asyncio.gather(
            *[run(given["chat"], max_tokens=64, cache_salt="7", min_p=0.0, extra_body={"top_k": 20}) for _ in range(4)],
            run(given["chat"], plain),
            run(given["broken"]),
            run(given["late"]),
            run(given["long"]),
        )
        refused: Sequence[dict[str, Any]] = await asyncio.gather(
            run(given["chat"], logit_bias={"5": 1.0}),
            run(given["chat"], TrainClientConfig(**endpoint, headers={"X-Team": "blue"})),
            run(given["chat"] | {"image": "python:3.11"}),
            run(given["unknown"]),
            run(given["chat"], routed_experts=True),
        )
        await leave(given, address, train)
        slow = asyncio.create_task(run(given["slow"]))
        await asyncio.sleep(given["cancel_s"])
        slow.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slow
        healthy = await verifiers.health()
        try:
            await verifiers._request(Juggle(), BaseResponse)
        except RuntimeError as error:
            refused = (*refused, {"refused": str(error)})
        commands = [await by_command(given, train, release) for release in given["of_servers"]]
    finally:
        await verifiers.close()
        serving.cancel()
        await serving
        await asyncio.to_thread(client.close)
    return {"episodes": episodes, "refused": refused, "healthy": healthy, "commands": commands}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run_episodes({"farm": sys.argv[1]} | json.loads(sys.argv[2])))))

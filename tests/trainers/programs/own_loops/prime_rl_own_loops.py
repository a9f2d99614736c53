"""verifiers' own environment compared with the farm's env server: the same tokens become prime-rl's same samples.

`prime_rl_own_loops.py FARM_URL ENGINE MODEL PRIME_RL`, where ENGINE is the scripted engine's address, MODEL a folder
with its tokenizer and PRIME_RL the folder of prime-rl's source. The farm runs rollouts; their recorded calls are then
the answers of an engine with vLLM's `/inference/v1/generate` to verifiers' own env server, whose harness `null` runs
the task. prime-rl's own `TrainEnv`, `TrainSink` and `BatchPacker` take the episodes of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from urllib.request import urlopen

import msgspec  # type: ignore[import-not-found, unused-ignore]
import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]
from absent_modules import leave_out  # type: ignore[import-not-found]
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
from verifiers.v1.configs.client import TrainClientConfig  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.runtimes import SubprocessRuntime  # type: ignore[import-not-found, unused-ignore]
from verifiers.v1.serve.server import EnvServer  # type: ignore[import-not-found, unused-ignore]

import farm
from farm.adapters.verifiers.env_server import FarmEnvServer
from farm.client.gathered_rollouts import GatheredRollouts

URL, ENGINE, MODEL, SOURCE = sys.argv[1:5]
sys.path[:0] = [f"{SOURCE}/packages/prime-rl-configs/src", f"{SOURCE}/src"]
leave_out("wandb", "torchtitan", "vllm", "prime_evals", "aiolimiter")

from prime_rl.configs.orchestrator import OrchestratorConfig  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.dispatcher import Dispatcher  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.envs import TrainEnvs  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.packing import BatchPacker  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.train_sink import TrainSink  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from prime_rl.orchestrator.types import (  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
    InflightEpisode,
    Policy,
    Progress,
)

NAME = "own-loops"
OF_TRACE = ("reward", "num_turns", "num_output_tokens", "num_input_tokens", "num_total_tokens", "is_truncated", "ok")
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


class _Played:
    """The farm's rollout that verifiers' environment repeats."""

    recording: ClassVar[Recording]
    reward: ClassVar[float]

    @classmethod
    def answer(cls, asked: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's answer to a request of `/inference/v1/generate`."""
        call = cls.recording.answer(asked["token_ids"], asked["sampling_params"])
        assert call.response_ids is not None
        assert call.response_logprobs is not None
        ids = call.response_ids.tolist()
        pairs = zip(ids, call.response_logprobs.tolist(), strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": call.finish_reason}
        return {"request_id": "r", "choices": [choice]}


class OwnTask(vf.Task[vf.TaskData]):  # type: ignore[misc, unused-ignore]
    """A task whose tool returns the replies of the farm's environment, and whose reward is the farm's."""

    @vf.intercept  # type: ignore[untyped-decorator, unused-ignore]
    def look(self, request: vf.Request) -> vf.Request:
        *before, last = request.messages
        if last.role == "tool":
            last = last.model_copy(update={"content": _Played.recording.observation()})
        return vf.Request(messages=[*before, last], tools=request.tools)

    @vf.reward  # type: ignore[untyped-decorator, unused-ignore]
    async def as_the_farm(self, trace: vf.Trace) -> float:
        return _Played.reward


class OwnTaskset(vf.Taskset[OwnTask, vf.TasksetConfig]):  # type: ignore[misc, unused-ignore]
    """One problem."""

    question: ClassVar[str]

    def load(self) -> list[OwnTask]:
        return [OwnTask(vf.TaskData(prompt=self.question))]


def taskset() -> None:
    """Make the taskset a module that verifiers can load by its name."""
    module = ModuleType(NAME.replace("-", "_"))
    module.OwnTaskset, module.__all__ = OwnTaskset, ["OwnTaskset"]  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def model_name() -> str:
    """Return the name of the scripted engine's model."""
    with urlopen(f"{ENGINE}/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


async def program(self: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
    """Return the command of verifiers' chat program in this environment, which has its packages."""
    path = Path(self.workdir) / "program.py"
    path.write_text(script)
    return [sys.executable, str(path)]


def configured(longest: int, agent: dict[str, Any], **train: Any) -> Any:
    """Return prime-rl's configuration of an orchestrator, of GRPO with groups of N."""
    player = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    source = {"name": NAME, "env": {"taskset": {"id": NAME}, "agent": player | agent}}
    written = {
        "model": {"name": MODEL},
        "batch_size": N,
        "group_size": N,
        "seq_len": 512,
        "renderer": {"name": "default", "tool_parser": "qwen3"},
        "train": {"sampling": {"max_completion_tokens": longest}, "source": [source]} | train,
    }
    return OrchestratorConfig.model_validate(written)


async def run_group(config: Any, server: Any, engine: str, recordings: list[tuple[Recording, float]] | None) -> Any:
    """Return the episodes of a group and prime-rl's envs, by an env server; one by one if there are recordings."""
    serving = asyncio.create_task(server.run())
    envs = TrainEnvs(
        config.train.source, {("train", NAME): server.address}, policy_pool=None, renderer_config=config.renderer
    )
    try:
        await envs.start()
        env = envs.get(NAME)
        task = next(env.tasks)
        endpoint = TrainClientConfig(
            base_url=engine, api_key_var="OWN_LOOPS_KEY", renderer_model_name=MODEL, renderer=config.renderer
        )
        given = (endpoint, model_name(), "7", task.data.model_dump(mode="json"))
        if recordings is None:
            episodes = list(await asyncio.gather(*[env.run(*given) for _ in range(N)]))
        else:
            episodes = []
            for _Played.recording, _Played.reward in recordings:
                episodes.append(await env.run(*given))
        await env.env_client.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return envs, task, episodes


async def trained(config: Any, envs: Any, task: Any, episodes: list[Any]) -> dict[str, Any]:
    """Return prime-rl's results for the episodes of a group: samples, micro-batches, and facts of the traces."""
    out: asyncio.Queue[Any] = asyncio.Queue()
    dispatcher = SimpleNamespace(
        groups={}, train_envs=envs, policy=Policy(version=7), run_id="run", run_name=None, out_q=out
    )
    progress = Progress(step=8)
    sink = TrainSink(
        config,
        tokenizer=TOKENIZER,
        train_envs=envs,
        mm_token_type_ids_mapping=None,
        progress=progress,
        batch_size=config.batch_size,
        token_batch_size=None,
    )
    batch = None
    for episode in episodes:
        meta = InflightEpisode("train", NAME, "group", task, 7, 8)  # type: ignore[arg-type, unused-ignore]
        await Dispatcher.emit_episode(dispatcher, meta, None, episode)
        batch = await sink.add(out.get_nowait()) or batch
    samples = [] if batch is None else batch.samples
    micro_batches = [each for of_worker in BatchPacker(config).pack(samples) for each in of_worker] if samples else []
    found: dict[str, Any] = {"samples": len(samples), "micro_batches": len(micro_batches)}
    for kind, values in (("sample", samples), ("micro-batch", micro_batches)):
        for place, value in enumerate(values):
            found |= {f"{kind} {name} {place}": item for name, item in msgspec.structs.asdict(value).items()}
    for place, episode in enumerate(episodes):
        (trace,) = episode.traces
        found |= {f"trace {name} {place}": getattr(trace, name) for name in OF_TRACE}
        said = [[(message.role, message.content) for message in branch.messages] for branch in trace.branches]
        found[f"trace messages {place}"] = said
    return found


def compared(
    rollouts: GatheredRollouts, question: str, longest: int, agent: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """Compare a group; `agent` are limits of verifiers' agent, `train` options of prime-rl's."""
    return asyncio.run(_compared(rollouts, question, longest, agent or {}, train))


async def _compared(
    rollouts: GatheredRollouts, question: str, longest: int, agent: dict[str, Any], train: dict[str, Any]
) -> dict[str, Any]:
    config = configured(longest, agent, **{"filter_zero_advantages": False} | train)
    OwnTaskset.question = question
    server = FarmEnvServer(
        rollouts,
        "tcp://127.0.0.1:0",
        instance=lambda data: problem(data["prompt"], ENGINE),
        request={"max_attempts": 1, "limits": agent},
    )
    client = rollouts.client
    ours = await run_group(config, server, ENGINE, None)
    traces = [episode.traces[0] for episode in ours[2]]
    assert all(trace.ok for trace in traces), [trace.errors for trace in traces]
    pairs = [(Recording(client.calls(trace.info["farm"]["rollout_id"])), float(trace.reward)) for trace in traces]
    with served({"/inference/v1/generate": _Played.answer}) as url:
        theirs = await run_group(config, EnvServer(config.train.source[0].env, "tcp://127.0.0.1:0"), f"{url}/v1", pairs)
    one, other = [await trained(config, *side) for side in (ours, theirs)]
    mask = traces[0].branches[0].sampled_mask
    recordings = [recording for recording, _ in pairs]
    return {
        "differing": sorted({name.rpartition(" ")[0] or name for name in differing(one, other)}),
        "names": sorted({name.rpartition(" ")[0] or name for name in other}),
        "faults": [fault for recording in recordings for fault in recording.faults],
        "lengths": [len(list(each)) for _, each in groupby(mask)][1:],
        "sampling": other_sampling(recordings, ("max_tokens", "temperature", "top_p", "top_k", "min_p")),
        "rewards": [reward for _, reward in pairs],
        "samples": [side["samples"] for side in (one, other)],
        "stops": [sorted({episode.traces[0].stop_condition for episode in side[2]}) for side in (ours, theirs)],
    }


def main() -> None:
    """Compare each kind of episode; print the differences."""
    os.environ["OWN_LOOPS_KEY"] = "EMPTY"
    taskset()
    SubprocessRuntime.prepare_uv_script = program
    if not hasattr(vf.Branch, "multi_modal_data"):
        # prime-rl's commit reads the pictures of each branch, too, which verifiers 0.4.0 keeps elsewhere; here are none
        vf.Branch.multi_modal_data = None
    with farm.connect(URL) as client:
        rollouts = GatheredRollouts(client)
        facts = {
            "stop": of_two_rewards(lambda: compared(rollouts, PLAIN, 48)),
            "stop_filtered": of_two_rewards(lambda: compared(rollouts, PLAIN, 48, filter_zero_advantages=True)),
            "cut": compared(rollouts, LONG, 4),
            "tool": compared(rollouts, TOOL, 200),
            "spaced": compared(rollouts, SPACED, 200),
        }
        turn = facts["tool"]["lengths"][0]
        facts |= {
            "cut_call": compared(rollouts, TOOL, turn // 2),
            "call_without_end": compared(rollouts, TOOL, turn - 1),
            "one_turn": compared(rollouts, TOOL, 200, {"max_turns": 1}),
        }
        rollouts.close()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

"""rLLM's own engine compared with the farm's runtime: the same answers of a model become the same batch.

`rllm_own_loops.py FARM_URL ENGINE MODEL`, where ENGINE is the scripted engine's address and MODEL a folder with its
tokenizer. The farm runs tasks of rLLM's `RemoteAgentFlowEngine` on the sessions of rLLM's gateway; the engine's answers
there are then replayed to rLLM's gateway for rLLM's `AgentFlowEngine`, which runs them by rLLM's own loop of tools.
rLLM's grouping, its advantages and its batch for verl take the episodes of both.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import rllm  # type: ignore[import-not-found, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[1]))
# the gateway is a separate package in rLLM's repository
sys.path.insert(0, str(Path(rllm.__file__).parents[1] / "rllm-model-gateway" / "src"))

from recorded_episodes import (  # type: ignore[import-not-found]
    LONG,
    PLAIN,
    SPACED,
    TOOL,
    N,
    differing,
    of_two_rewards,
    problem,
)
from recorded_server import served  # type: ignore[import-not-found]
from rllm.engine.agentflow_engine import (  # type: ignore[import-not-found, unused-ignore]
    AgentFlowEngine,
)
from rllm.engine.remote_agent_flow_engine import (  # type: ignore[import-not-found, unused-ignore]
    RemoteAgentFlowEngine,
)
from rllm.eval.types import EvalOutput  # type: ignore[import-not-found, unused-ignore]
from rllm.harnesses.tool_calling import ToolCallingMixin  # type: ignore[import-not-found, unused-ignore]
from rllm.trainer.algorithms.advantage import (  # type: ignore[import-not-found, unused-ignore]
    collect_reward_and_advantage_from_trajectory_groups,
)
from rllm.trainer.algorithms.config import (  # type: ignore[import-not-found, unused-ignore]
    AlgorithmConfig,
    CompactFilteringConfig,
    TransformConfig,
)
from rllm.trainer.algorithms.transform import (  # type: ignore[import-not-found, unused-ignore]
    transform_episodes_to_trajectory_groups,
)
from rllm.trainer.verl.transform import (  # type: ignore[import-not-found, unused-ignore]
    transform_trajectory_groups_to_dataproto,
    update_dataproto_with_advantages,
)
from rllm.types import Episode, Trajectory  # type: ignore[import-not-found, unused-ignore]
from rllm_episodes import VerlEngine, gateway_on  # type: ignore[import-not-found]
from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore]

from farm.adapters.rllm import FarmRuntime

URL, ENGINE, MODEL = sys.argv[1:4]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
PROMPT, RESPONSE = 64, 256


class Answers:
    """An inference server that replays each rollout's answers, or forwards calls to the scripted engine."""

    def __init__(self, sampling: dict[str, Any]) -> None:
        self.sampling = sampling
        self.given: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.waiting: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.faults: list[str] = []

    def forwarded(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the scripted engine's answer, and keep it; the engine parses only calls of a tool in the request."""
        shown = asked | {"tools": [Look.schema]}
        request = Request(
            f"{ENGINE}/chat/completions", json.dumps(shown).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request) as answer:
            said: dict[str, Any] = json.load(answer)
        self.given.append((asked, said))
        return said

    def again(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer that the farm's rollout got at this place."""
        if not self.waiting:
            self.faults.append("one call more")
            return self.given[-1][1]
        before, said = self.waiting.pop(0)
        if conversation(asked["messages"]) != conversation(before["messages"]):
            self.faults.append(f"{asked['messages']} and not {before['messages']}")
        names = ("logprobs", "return_token_ids", *self.sampling)
        differ = [name for name in names if asked.get(name) != before.get(name)]
        self.faults += [f"{name} {asked.get(name)} and not {before.get(name)}" for name in differ]
        return said


def conversation(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the parts of messages that a chat template reads."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []],
        )
        for message in messages
    ]


class Look:
    """A tool that returns the replies of the farm's environment."""

    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}  # noqa: RUF012

    def __init__(self, said: str) -> None:
        self.said = said

    def execute(self, sandbox: Any, **_: Any) -> str:
        return self.said


class OwnFlow(ToolCallingMixin):  # type: ignore[misc, unused-ignore]
    """rLLM's loop of tools on a question."""

    name = "default"

    def __init__(self, answers: Answers, calls: Sequence[Sequence[Any]], max_turns: int) -> None:
        self.answers, self.calls, self.max_turns = answers, calls, max_turns

    def run(self, task: Any, config: Any) -> Episode:
        from openai import OpenAI

        place = int(config.session_uid.rpartition(":")[2])
        if self.answers.waiting:
            self.answers.faults.append(f"{len(self.answers.waiting)} calls fewer")
        self.answers.waiting = list(self.calls[place])
        later = self.calls[place][1:]
        said = later[0][0]["messages"][-1]["content"] if later else ""
        client = OpenAI(base_url=config.base_url, api_key="none", max_retries=0)
        messages = [{"role": "user", "content": task.metadata["question"]}]
        steps, _, _ = self.run_tool_loop(client, config.model, messages, [Look(said)], None, self.max_turns)
        return Episode(id=config.session_uid, trajectories=[Trajectory(name=self.name, steps=steps)])


class AsTheFarm:
    """Returns the farm's rewards."""

    def __init__(self, rewards: Sequence[float]) -> None:
        self.rewards = rewards

    def evaluate(self, task: Any, episode: Any) -> EvalOutput:
        reward = self.rewards[int(episode.id.rpartition(":")[2])]
        return EvalOutput(reward=reward, is_correct=reward >= 1.0)


def started(address: str, sampling: dict[str, Any], model: str) -> Any:
    """Return rLLM's gateway in front of an inference server, whose sessions have these sampling parameters."""
    engine = VerlEngine(address)
    engine.train_sampling_params = sampling
    return gateway_on(engine, model)


def calls_of(answers: Answers, episodes: Sequence[Any]) -> list[list[Any]]:
    """Return the engine's requests and answers in each episode, by the tokens that rLLM kept of it."""
    left, found = list(answers.given), []
    for episode in episodes:
        calls = []
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                place = next(n for n, pair in enumerate(left) if tokens(pair[1]) == (step.response_ids, step.logprobs))
                calls.append(left.pop(place))
        found.append(calls)
    assert not left, "each call belongs to an episode"
    return found


def tokens(said: dict[str, Any]) -> tuple[list[int], list[float]]:
    (choice,) = said["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def batch_of(episodes: Sequence[Any]) -> dict[str, Any]:
    """Return rLLM's results for a group's episodes: its trajectories, its advantages, its batch for verl."""
    groups, _ = transform_episodes_to_trajectory_groups(
        list(episodes), TransformConfig(), CompactFilteringConfig(enable=True, mask_error=True)
    )
    collect_reward_and_advantage_from_trajectory_groups(groups, AlgorithmConfig())
    engine = SimpleNamespace(tokenizer=TOKENIZER, processor=None)
    batch = update_dataproto_with_advantages(
        transform_trajectory_groups_to_dataproto(groups, engine, PROMPT, RESPONSE), groups
    )
    found = dict(batch.batch.items())
    plain = ("episode_ids", "trajectory_ids", "step_nums", "is_correct", "is_valid", "is_last_step", "group_roles")
    found |= {name: batch.non_tensor_batch[name].tolist() for name in plain}
    found["repeat_counts"] = batch.meta_info["repeat_counts"]
    for place, episode in enumerate(episodes):
        (trajectory,) = episode.trajectories
        found |= {
            f"episode {place}": (episode.id, episode.is_correct, trajectory.name, trajectory.reward),
            f"termination {place}": episode.termination_reason.name,
            f"steps {place}": [
                (step.prompt_ids, step.response_ids, step.logprobs, step.advantage, step.model_output.finish_reason)
                for step in trajectory.steps
            ],
        }
    return found


def compared(question: str, sampling: dict[str, Any], max_turns: int = 8) -> dict[str, Any]:
    """Compare the batches of a problem, with sampling parameters of the session and a limit of turns."""
    return asyncio.run(_compared(question, sampling, max_turns))


async def _compared(question: str, sampling: dict[str, Any], max_turns: int) -> dict[str, Any]:
    answers = Answers(sampling)
    task = {"question": question}
    models = model_list()
    with served(
        {"/v1/chat/completions": answers.forwarded, "/health": lambda _: {}, "/v1/models": lambda _: models}
    ) as url:
        gateway = started(url, sampling, models["data"][0]["id"])
        runtime = FarmRuntime(
            URL,
            instance=lambda asked: problem(asked["question"], ENGINE),
            request={"max_attempts": 1, "limits": {"max_turns": max_turns}},
        )
        runtime.initialize()
        try:
            remote = RemoteAgentFlowEngine(runtime=runtime, gateway=gateway, session_timeout=120.0)
            ours = await remote.execute_tasks([task] * N, ["group"] * N)
        finally:
            runtime.shutdown()
            await asyncio.to_thread(gateway.stop)
    rewards = [float(episode.trajectories[0].reward) for episode in ours]
    calls = calls_of(answers, ours)
    with served(
        {"/v1/chat/completions": answers.again, "/health": lambda _: {}, "/v1/models": lambda _: models}
    ) as url:
        gateway = started(url, sampling, models["data"][0]["id"])
        try:
            own = AgentFlowEngine(
                OwnFlow(answers, calls, max_turns),
                AsTheFarm(rewards),
                gateway,
                models["data"][0]["id"],
                n_parallel_tasks=1,
                retry_limit=1,
                train_sampling_params=sampling,
            )
            theirs = await own.execute_tasks([task] * N, ["group"] * N)
            own.shutdown()
        finally:
            await asyncio.to_thread(gateway.stop)
    if answers.waiting:
        answers.faults.append(f"{len(answers.waiting)} calls fewer")
    one, other = batch_of(ours), batch_of(theirs)
    row = one["response_mask"][0]
    there = int(one["attention_mask"][0, PROMPT:].sum())
    return {
        "differing": sorted({name.rstrip(" 0123456789") for name in differing(one, other)}),
        "names": sorted({name.rstrip(" 0123456789") for name in other}),
        "faults": answers.faults,
        "lengths": [len(list(each)) for _, each in groupby(row[:there].tolist())],
        "rewards": rewards,
        "ends": [sorted({episode.termination_reason.name for episode in side}) for side in (ours, theirs)],
    }


def model_list() -> dict[str, Any]:
    with urlopen(f"{ENGINE}/models") as answer:
        listed: dict[str, Any] = json.load(answer)
    return listed


def main() -> None:
    """Compare each kind of episode; print the differences."""
    facts = {
        "stop": of_two_rewards(lambda: compared(PLAIN, {"temperature": 0.7, "top_p": 0.9})),
        "cut": compared(LONG, {"temperature": 0.7, "max_tokens": 4}),
        "tool": compared(TOOL, {"temperature": 0.7}),
        "spaced": compared(SPACED, {"temperature": 0.7}),
    }
    turn = facts["tool"]["lengths"][0]
    facts |= {
        "cut_call": compared(TOOL, {"temperature": 0.7, "max_tokens": turn // 2}),
        "call_without_end": compared(TOOL, {"temperature": 0.7, "max_tokens": turn - 1}),
        "one_turn": compared(TOOL, {"temperature": 0.7}, 1),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

"""Agent Lightning's own example trains on rollouts of the farm: its configuration, data set, trainer and loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import farm
from farm.client.local import LocalFarm
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.api import served
from tests.services.farms import embedded, farm_folder
from tests.trainers.conftest import Program
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTIONS = [f"How many hops has barley number {index}?" for index in range(12)]
PLAYS = tuple(
    Branch(name=answer, turns=(ScriptedTurn(content=f"I count them. The answer is \\boxed{{{answer}}}."),))
    for answer in ("3", "4")
)
SCRIPT = Script([ScriptedProblem(match=question, branches=PLAYS) for question in QUESTIONS])
LOOPS = ("in_steps", "asynchronous")


def test_official_example_trains_on_tokens_sampled_by_the_farm(run: Program, trainers: Path, model_text: Path) -> None:
    source = trainers / "agent-lightning"
    if not (source / "examples").exists():
        absent(f"the source of Agent Lightning is not in {source}: tests/trainers/environment.sh could not fetch it")
    double = EngineDouble(SCRIPT, model=str(model_text), tokens_per_s=200)
    with (
        farm_folder() as folder,
        serving(double.app()) as engine,
        embedded(folder) as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
        served(cast(LocalFarm, client), speak=["agent-lightning"]) as url,
    ):
        example = source / "examples" / "gsm8k"
        words = (example, model_text, engine, json.dumps(QUESTIONS))
        facts = run("own_examples/lightning_training", *words, path=source, url=url, release=trainers / "verl-0.8")
        rollouts = [rollout for batch in client.recent(1000) for rollout in client.collect(batch)]
    sampled = {
        (tuple(segment.prompt_ids.tolist()), tuple(segment.response_ids.tolist()), rollout.reward)
        for rollout in rollouts
        for segment in rollout.segments
    }
    for name in LOOPS:
        loop = facts[name]
        rows = loop["rows"]
        assert {row["step"] for row in rows} == {1, 2, 3}
        assert {(tuple(row["prompt"]), tuple(row["response"]), row["reward"]) for row in rows} <= sampled
        assert {row["reward"] for row in rows} == {0.0, 1.0}
        assert all(row["sampled"] == len(row["response"]) == len(row["log_probs"]) for row in rows)
        assert any(row["advantage"] for row in rows)
        assert loop["n_updates"] == 4
        assert loop["validation"]
    assert facts["in_steps"]["carried"] == [0, 0, 0]
    assert max(facts["asynchronous"]["carried"]) > 0, "some continued while a step was trained"

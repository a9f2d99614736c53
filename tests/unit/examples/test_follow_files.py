"""The example's handler and problems, run with the real shell in a folder of this machine."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from examples.training.file_chains import DATA_SOURCE, FileChain, file_chain, file_chains
from examples.training.follow_files import follow_files
from examples.training.follow_files.follow_files import FollowFilesHandler, FollowFilesInstance
from farm.records.request import Limits, SamplingParams
from farm.records.rollout import Outcome, Stage
from workers.agents.react import ReactAgent
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Submission
from workers.testing import ScriptedPolicy, answering, calling
from workers.testing.local_sandbox import LocalProvider
from workers.tools.bash import BashTool

CHAIN = FileChain({"a": "b", "b": "c", "c": "a"}, "a", 2, "c")


def test_the_package_names_the_handler_by_its_data_source() -> None:
    package = tomllib.loads(Path(follow_files.__file__).with_name("pyproject.toml").read_text())
    assert package["project"]["entry-points"]["farm.handlers"] == {DATA_SOURCE: "follow_files:FollowFilesHandler"}
    assert FollowFilesHandler.data_source == DATA_SOURCE


def test_problems_are_solvable_and_reproducible_for_a_step() -> None:
    chains = file_chains(seed=1, step=2, n=50)
    assert chains == file_chains(seed=1, step=2, n=50)
    assert chains != file_chains(seed=1, step=3, n=50)
    assert {chain.hops for chain in chains} == {1, 2, 3, 4}
    for chain in chains:
        FollowFilesInstance.model_validate(chain.fields)
        assert len(chain.files) == 26
        assert chain.request == f"follow {chain.start} hops {chain.hops}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answer": "b"}, "2 hops from 'a' lead to 'c', not to 'b'"),
        ({"files": {"a": "b"}}, "there is no file 'b' to read"),
        ({"files": {"a": "../x"}}, "files.a"),
        ({"hops": 0}, "hops"),
        ({"more": 1}, "more"),
    ],
)
def test_bad_instances_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        FollowFilesInstance.model_validate(CHAIN.fields | change)


@pytest.mark.parametrize(("last", "reward"), [("answer c", 1.0), ("answer b", 0.0), ("c", 0.0)])
def test_agent_that_reads_the_files_is_scored_by_its_answer(last: str, reward: float) -> None:
    handler = FollowFilesHandler(FollowFilesInstance.model_validate(CHAIN.fields))

    async def run_and_score() -> tuple[AgentResult, float, list[Any]]:
        spec = handler.sandbox()
        assert spec is not None
        sandbox = await LocalProvider().start("follow", spec)
        reads = (calling(("bash", {"command": f"cat {name}"})) for name in "ab")
        policy = ScriptedPolicy(*reads, answering(last))
        recorded: list[Any] = []

        async def record(call: Any) -> None:
            recorded.append(call)

        async def keep(index: int, artefact: Artefact) -> str:
            return ""

        tool = BashTool(sandbox)
        try:
            await handler.prepare(sandbox)
            context = AgentContext(
                "b.0.0", handler.messages(), {"bash": tool}, policy, SamplingParams(), Limits(), record, keep
            )
            result = await ReactAgent().run(context)
            submission = await handler.collect(sandbox, result.answer)
        finally:
            await tool.close()
            await sandbox.stop()

        def fresh(*_: object, **__: object) -> Any:
            raise AssertionError(f"{Stage.EVAL} needs no sandbox")

        score = await handler.evaluator().evaluate(submission, fresh, 1.0)
        return result, score.value, [each["content"] for call in recorded for each in call.observations]

    result, value, observations = asyncio.run(run_and_score())
    assert result == AgentResult(Outcome.ANSWERED, last)
    assert value == reward
    assert sorted(set(observations)) == ["b", "c"]


def test_missing_answer_scores_zero() -> None:
    evaluator = FollowFilesHandler(FollowFilesInstance.model_validate(CHAIN.fields)).evaluator()
    score = asyncio.run(evaluator.evaluate(Submission(), None, 1.0))  # type: ignore[arg-type]
    assert score.value == 0.0


def test_every_file_names_an_existing_file() -> None:
    random = Random(4)
    assert all(set(chain.files.values()) <= set(chain.files) for chain in (file_chain(random) for _ in range(20)))

"""verifiers' own client runs rollouts on the farm: its protocols, its types, and the farm's tokens and scores in them.

With two versions: the installed one, and that of prime-rl's newest snapshot, which has other protocols and types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farm.client.local import LocalFarm
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.trainers.conftest import EXPERTS, N_PROMISES, QUESTION, VERIFIERS, Program, are_of, verifiers_of
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

LONG = "Look twice."
TURNS = (
    ScriptedTurn(content="I look.", tool_calls=(ScriptedCall(name="look", arguments={"at": "it"}),)),
    ScriptedTurn(content="There is no such tool: three."),
)
SCRIPT = Script(
    [
        ScriptedProblem(
            match=QUESTION,
            branches=tuple(Branch(name=text, turns=(ScriptedTurn(content=text),)) for text in ("three", "four")),
        ),
        ScriptedProblem(match=LONG, branches=(Branch(name="long", turns=TURNS),)),
    ]
)
ENGINE_KEY = "sk-of-the-trainer"


def task(data_source: str, **fields: Any) -> dict[str, Any]:
    return {"data_source": data_source, "fields": fields, "idx": 3}


CHAT = task("chat", question=QUESTION, expected="three")


@pytest.mark.parametrize("version", VERIFIERS)
def test_verifiers_runs_rollouts_on_the_farm(
    run: Program, client: LocalFarm, tmp_path: Path, trainers: Path, version: str
) -> None:
    release = verifiers_of(trainers, version)
    request_file = tmp_path / "request.json"
    request_file.write_text(json.dumps({"limits": {"max_turns": 3}, "max_attempts": 1}))
    engine = EngineDouble(SCRIPT, key=ENGINE_KEY, weight_version="7", experts=EXPERTS)
    with serving(engine.app()) as address:
        given = {
            "engine_url": f"{address}/v1",
            "engine_key": ENGINE_KEY,
            "model": engine.machine.name,
            "routed_experts": EXPERTS.top_k,
            "chat": CHAT,
            "broken": task("noop", fail="run:engine_error"),
            "long": task("chat", question=LONG, expected="three"),
            "late": task("noop", seconds=60) | {"timeout": {"agent": 0.5}},
            "slow": task("noop", seconds=300),
            "unknown": task("juggling"),
            "cancel_s": 5.0,
            "request_file": str(request_file),
            "release": release or "",
            # servers in an environment of the other version, too: the client's request decides, not the installation
            "of_servers": [verifiers_of(trainers, other) or "" for other in VERIFIERS],
        }
        result = run("verifiers_episodes", json.dumps(given), release=release)
        *trained, plain, broken, late, long = result["episodes"]
        for episode in (*trained, long):
            (rollout,) = (each for each in client.collect(_batch(episode)) if each.rollout_id == _id(episode))
            (segment,) = rollout.segments
            (branch,) = episode["branches"]
            assert branch["token_ids"] == [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
            assert branch["mask"] == [False] * len(segment.prompt_ids) + segment.response_mask.astype(bool).tolist()
            assert branch["logprobs"][len(segment.prompt_ids) :] == segment.response_logprobs.tolist()
            assert are_of(branch["experts"][:-1], branch["token_ids"])
            assert branch["experts"][-1] == branch["experts"][-2], "as in verifiers for the last token"
            assert (episode["ok"], episode["completed"], episode["stop"]) == (True, True, "agent_completed")
            assert episode["rewards"] == {"contains": rollout.reward}
            calls = client.calls(rollout.rollout_id)
            assert episode["usage"] == [[call.n_prompt_tokens, call.n_response_tokens] for call in calls]
            assert episode["task"] == ["FarmTask", episode["hash"]]
            assert episode["farm"]["version_min"] == 7
            assert {(call.engine, call.sampling["temperature"]) for call in calls} == {(f"{address}/v1", 0.9)}
        assert {episode["reward"] for episode in trained} == {0.0, 1.0}
        assert [episode["roles"] for episode in trained] == [["user", "assistant"]] * 4
        (call,) = client.calls(_id(trained[0]))
        assert (call.sampling["top_k"], call.sampling["max_tokens"], call.sampling["min_p"]) == (20, 64, 0.0)
        assert call.sampling["cache_salt"] == "7", "a trainer that keeps its prefix cache relies on it"
        assert long["roles"] == ["user", "assistant", "tool", "assistant"]
        assert 0 < sum(long["branches"][0]["mask"]) < len(long["branches"][0]["mask"])
        # a plain client's endpoint is asked for no ids, and so its trace has none
        assert plain["ok"]
        assert [(branch["token_ids"], branch["experts"]) for branch in plain["branches"]] == [([], None)]
        # a broken rollout is an error, which its consumers drop, and no reward
        assert (broken["ok"], broken["rewards"]) == (False, {"reward": None})
        assert [error["type"] for error in broken["errors"]] == ["ProviderError"]
        assert _id(broken) in broken["errors"][0]["message"]
        # a task's own timeout is the policy's limit: the rollout stops, is scored, and is no error
        assert (late["ok"], late["stop"], late["reward"], late["errors"]) == (True, "agent_timeout", 1.0, [])
        assert (broken["stop"], late["timeout"]) == (("provider_error", True) if release is None else ("error", None))
        reasons = [each["refused"] for each in result["refused"]]
        names = ("sampling.logit_bias", "client.headers", "image", "juggling", "sampling.routed_experts", "'juggle'")
        for reason, named in zip(reasons, names, strict=True):
            assert named in reason.replace("\n", ".")
        assert result["healthy"]
        for command in result["commands"]:
            assert (command["ok"], [len(branch["token_ids"]) > 0 for branch in command["branches"]]) == (True, [True])
            assert all(are_of(branch["experts"][:-1], branch["token_ids"]) for branch in command["branches"])
            assert "temperature" not in client.calls(_id(command))[0].sampling, "that is the engine's choice"
        # a rollout that a client cancels ends on the farm
        *last_batches, cancelled = client.recent(3)
        assert [_batch(command) for command in result["commands"]] == last_batches[::-1]
        assert client.wait(cancelled, 120).n_cancelled == 1
        assert ENGINE_KEY not in str(result)


@pytest.mark.parametrize("version", VERIFIERS)
def test_each_training_row_is_a_branch_of_the_trace(run: Program, trainers: Path, version: str) -> None:
    release = verifiers_of(trainers, version)
    result = run("verifiers_traces", release=release)
    first, second, untrusted, plain = result["branches"]
    names = ("token_ids", "mask", "logprobs")
    assert [{name: branch[name] for name in names} for branch in (first, second)] == result["rows"]
    # rows that may not train, and calls without ids, have no tokens
    assert [branch["token_ids"] for branch in (untrusted, plain)] == [[], []]
    look, looked = ["user", "Look around."], ["assistant", None]
    assert first["messages"] == [look, looked, ["tool", "a b"], ["assistant", "One thing."]]
    assert second["messages"] == [*first["messages"], ["user", "Sure?"], ["assistant", "Or two."]]
    assert untrusted["messages"] == [look, ["assistant", "Three."]]
    assert plain["messages"] == [look, ["assistant", "Four."]]
    assert [branch["calls"] for branch in result["branches"]] == [
        ["tool_calls", "stop"],
        ["stop"],
        ["stop"],
        ["length"],
    ]
    shown = [[tool["name"] for tool in branch["tools"]] for branch in result["branches"]]
    assert result["tools"] == ["bash", "submit"]
    if release is None:
        assert shown == [["bash"], ["bash", "submit"], [], []]
        assert first["tools"] == [
            {"type": "function", "name": "bash", "description": "d", "parameters": {"type": "object"}}
        ]
    assert (result["rewards"], result["metrics"]) == ({"grader": 0.25}, {"passed": 1.0, "n": 3.0})
    assert result["stop"] == [True, "max_turns", True]
    assert result["order"] == sorted(result["order"])
    routed = result["routed"]
    if release is not None:
        # a60a606 keeps for the last token of a turn the experts of the one before; the next call has the right ones
        assert routed["theirs"][1][-1] == routed["theirs"][1][-2] != routed["ours"][1][-1]
        routed["theirs"][1][-1] = routed["ours"][1][-1]
    assert routed["ours"] == routed["theirs"], "as verifiers itself assigns a turn's experts to its nodes"
    assert (routed["n_tokens"], routed["n_rows"]) == (7, 7)
    assert result["lost"] == [False, True, "sandbox_error", "SandboxError", {"reward": None}]


@pytest.mark.parametrize("version", VERIFIERS)
def test_configuration_of_prime_rl_is_followed_or_refused(run: Program, trainers: Path, version: str) -> None:
    source = trainers / "prime-rl"
    if not (source / "packages").exists():
        absent(f"the source of prime-rl is not in {source}: tests/trainers/environment.sh could not fetch it")
    facts = run("prime_rl_sampling", source, release=verifiers_of(trainers, version))
    # its example of a text to reverse: for training, top_k and min_p are set in addition to the configured ones
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 128, "cache_salt": "3"}
    assert facts["train"] == drawn
    assert facts["default"] == {"temperature": 1.0, "top_p": 1.0}
    assert facts["evaluation"] == {"temperature": None}, "an unset parameter is the engine's choice"
    of_evaluation = {"temperature": 0.5, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "max_tokens": 7}
    assert facts["set"] == of_evaluation | {"repetition_penalty": 1.1}
    assert facts["refused"] == ["sampling.reasoning_effort", "sampling.logit_bias"]


@pytest.mark.parametrize("version", VERIFIERS)
def test_frames_equal_the_recorded_ones(run: Program, trainers: Path, version: str) -> None:
    recorded = json.loads((Path(__file__).parents[1] / "data" / "verifiers_frames.json").read_text())
    assert run("verifiers_frames", release=verifiers_of(trainers, version)) == recorded[version]


def _id(episode: dict[str, Any]) -> str:
    return str(episode["farm"]["rollout_id"])


def _batch(episode: dict[str, Any]) -> str:
    return _id(episode).split(".")[0]


@pytest.mark.parametrize("version", VERIFIERS)
def test_traces_keep_the_promises_of_result_adapters(run: Program, trainers: Path, version: str) -> None:
    faults = run("results_examined", "farm.adapters.verifiers.traces", release=verifiers_of(trainers, version))
    assert len(faults) == N_PROMISES
    assert not any(faults.values()), faults

"""The same episodes through a trainer's own loop and through the farm become the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.trainers.conftest import PROGRAMS, QUESTION, VERIFIERS, Program, verifiers_of
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

LOOK, SPACED_LOOK = (
    ScriptedTurn(content=text, tool_calls=(ScriptedCall(name="look", arguments={"at": "it"}),))
    for text in ("I look.", "I look.\n\n")
)


def one_turn(*texts: str) -> tuple[Branch, ...]:
    return tuple(Branch(name=text, turns=(ScriptedTurn(content=text),)) for text in texts)


def two_turns(first: ScriptedTurn) -> tuple[Branch, ...]:
    return tuple(
        Branch(name=text, turns=(first, ScriptedTurn(content=f"There is no such tool: {text}.")))
        for text in ("three", "four")
    )


SCRIPT = Script(
    [
        ScriptedProblem(match=QUESTION, branches=one_turn("three", "four")),
        ScriptedProblem(match="Count.", branches=one_turn("one two three four five six", "three, two, one, nought")),
        ScriptedProblem(match="Look twice.", branches=two_turns(LOOK)),
        ScriptedProblem(match="Look with space.", branches=two_turns(SPACED_LOOK)),
    ]
)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serving(EngineDouble(SCRIPT, weight_version="7").app()) as address:
        yield f"{address}/v1"


def unequal(cases: dict[str, Any]) -> dict[str, Any]:
    """Return the cases that differ: unequal arrays, and other differences of the trainer's loop."""
    found = {name: (case["differing"], case["faults"]) for name, case in cases.items()}
    return {name: faults for name, faults in found.items() if any(faults)}


def test_agent_loops_of_verl_make_the_same_batches(run: Program, engine: str, model_text: Path) -> None:
    cases = run("own_loops/verl_own_loops", engine, model_text, path=PROGRAMS)
    assert len(cases) == 9
    assert unequal(cases) == {}
    arrays = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"}
    assert {*cases["tool"]["names"]} == arrays | {"rollout_log_probs", "rm_scores", "advantages"}
    assert [case["turns"][0] for case in cases.values()] == [case["turns"][1] for case in cases.values()]
    # the cases are what their names say: sampled, from the tool, sampled
    turn, observation, last = cases["tool"]["lengths"][0]
    assert cases["cut_in_second_turn"]["lengths"][0] == [turn, observation, last - 3]
    assert cases["one_left_after_tool"]["lengths"][0] == [turn, observation, 1]
    for name in ("full_after_tool", "exactly_full_after_tool", "exactly_the_first_turn"):
        assert cases[name]["lengths"][0] == [turn]
    assert cases["cut_in_first_turn"]["lengths"][0] == [turn - 1]


def test_generator_of_skyrl_makes_the_same_output(run: Program, engine: str, model_text: Path) -> None:
    cases = run("own_loops/skyrl_own_loops", engine, model_text, path=PROGRAMS)
    assert len(cases) == 9
    different, faults = unequal(cases).pop("cut_call")
    assert faults, "SkyRL continues after a cut turn without closing it, see docs/reference/oracles.md"
    assert unequal({name: case for name, case in cases.items() if name != "cut_call"}) == {}
    assert "stop_reasons" not in different
    ends = {name: case["stop_reasons"][0] for name, case in cases.items()}
    assert [name for name, reasons in ends.items() if reasons == ["length"]] == [
        "cut",
        "input_too_long",
        "without_those_cut",
        "zero_for_those_cut",
    ]
    assert cases["tool"]["lengths"][:2] == cases["input_just_fits"]["lengths"][:2]
    assert cases["input_too_long"]["lengths"] == cases["one_turn"]["lengths"] == cases["tool"]["lengths"][:1]


def test_loop_of_trl_makes_the_same_batch(run: Program, engine: str, model_text: Path) -> None:
    cases = run("own_loops/trl_own_loops", engine, model_text, path=PROGRAMS)
    assert len(cases) == 11
    different, faults = unequal(cases).pop("exactly_full_after_tool")
    assert "2 calls and not 1" in faults, "TRL samples with no token left, see docs/reference/oracles.md"
    assert {"completion_ids", "completion_mask", "tool_mask"} <= {*different}
    assert unequal({name: case for name, case in cases.items() if name != "exactly_full_after_tool"}) == {}
    assert {*cases["tool"]["names"]} == {
        "advantages", "completion_ids", "completion_mask", "importance_sampling_ratio", "num_items_in_batch",
        "old_per_token_logps", "prompt_ids", "prompt_mask", "sampling_per_token_logps", "tool_mask",
    }  # fmt: skip
    turn, observation, last = cases["tool"]["lengths"]
    assert cases["cut_in_second_turn"]["lengths"] == [turn, observation, last - 3]
    assert cases["one_left_after_tool"]["lengths"] == [turn, observation, 1]
    for name in ("full_after_tool", "no_tool_turns"):
        assert cases[name]["lengths"] == [turn]
    assert cases["one_tool_turn"]["lengths"][:2] == [turn, observation]
    assert cases["cut_in_first_turn"]["lengths"] == [turn - 1]
    assert any(len(set(case["rewards"])) == 2 for case in cases.values()), "advantages need different rewards"


def test_executors_of_openrlhf_make_the_same_experience(run: Program, engine: str, model_text: Path) -> None:
    cases = run("own_loops/openrlhf_own_loops", engine, model_text, path=PROGRAMS)
    assert len(cases) == 9
    full = {"exactly_full_after_tool", "full_after_tool"}
    assert unequal(cases).keys() == full, "OpenRLHF keeps an answer that fills the row, see docs/reference/oracles.md"
    assert all(cases[name]["faults"] == [] for name in full)
    # OpenRLHF's own loop of several turns ignores it
    bounded = cases["limit_of_turns"]
    assert bounded["allowed"] == [[96], [512 - bounded["n_prompt"]]]
    truncated = {name: case["truncated"] for name, case in cases.items()}
    cut = ("cut", "cut_by_length", "cut_in_second_turn", "one_left_after_tool")
    assert truncated == {name: [[True], [False]] if name in full else [[name in cut]] * 2 for name in cases}
    turn, observation, last = cases["tool"]["lengths"]
    assert cases["cut_in_second_turn"]["lengths"] == [turn, observation, last - 3]
    assert cases["one_left_after_tool"]["lengths"] == [turn, observation, 1]
    assert all(cases[name]["lengths"] == [turn] for name in full)


def test_generation_of_slime_makes_the_same_samples(
    run: Program, engine: str, model_text: Path, trainers: Path
) -> None:
    source = trainers / "slime"
    if not (source / "slime").exists():
        absent(f"the source of slime is not in {source}: tests/trainers/environment.sh could not fetch it")
    cases = run("own_loops/slime_own_loops", source, model_text, engine, path=source)
    assert unequal(cases) == {}, cases
    assert (cases["stop"]["status"], cases["cut"]["status"]) == (["completed"], ["truncated"])
    assert cases["cut"]["lengths"] == [4] * 4
    assert cases["cut"]["masks"] == [[[1] * 4] * 4] * 2


def test_async_worker_of_trl_makes_the_same_samples(run: Program, engine: str, model_text: Path) -> None:
    cases = run("own_loops/trl_async_own_loops", engine, model_text, path=PROGRAMS)
    assert len(cases) == 12
    own = {"cut_call": "1 calls and not 2", "spaced": "prompt"}
    for name, fault in own.items():
        different, faults = unequal({name: cases[name]})[name]
        assert all(fault in each for each in faults), "see docs/reference/oracles.md"
        assert {"input_ids", "completion_mask", "packed token_index"} <= {*different}
        # neither of them has another reward
        assert not {"advantage", "reward", "model_version", "group_id"} & {*different}
    assert unequal({name: case for name, case in cases.items() if name not in own}) == {}
    # TRL does not train text that it rewrites
    assert cases["spaced"]["n_trained"][0] > cases["spaced"]["n_trained"][1] > 0
    for case in cases.values():
        # vLLM takes both as no limit
        assert case["sampling"] in ([], ["top_k 0 and not -1"])
    assert cases["sampled"]["sampling"] == []
    packed = {name for name in cases["stop_packed"]["names"] if name.startswith("packed ")}
    assert {"packed position_ids", "packed old_log_probs", "packed advantages", "packed shift_labels"} <= packed
    turn, observation, _ = cases["tool"]["lengths"]
    for name in ("just_the_budget", "over_the_budget"):
        assert cases[name]["lengths"][:2] == [turn, observation]
    assert cases["over_the_budget"]["n_tokens"] == cases["tool"]["n_tokens"] - 3 < cases["just_the_budget"]["n_tokens"]
    assert cases["no_tool_turns"]["lengths"] == [turn]
    assert cases["cut"]["lengths"] == [4]
    assert all(len({*cases[name]["rewards"]}) == 2 for name in ("stop", "stop_packed"))


@pytest.mark.parametrize("version", VERIFIERS)
def test_environment_of_verifiers_makes_the_same_samples_of_prime_rl(
    run: Program, engine: str, model_text: Path, trainers: Path, version: str
) -> None:
    source = trainers / "prime-rl"
    if not (source / "packages").exists():
        absent(f"the source of prime-rl is not in {source}: tests/trainers/environment.sh could not fetch it")
    release = verifiers_of(trainers, version)
    cases = run("own_loops/prime_rl_own_loops", engine, model_text, source, path=PROGRAMS, release=release)
    assert len(cases) == 8
    different, faults = unequal(cases).pop("cut_call")
    assert {*faults} == {"1 calls and not 2"}, "the farm answers a call without an end, see docs/reference/oracles.md"
    assert {"sample token_ids", "sample mask", "trace num_turns"} <= {*different}
    assert not {"trace reward", "trace ok", "trace is_truncated", "sample env_name"} & {*different}
    called = {"call_without_end", "one_turn", "spaced", "tool"}
    rest = unequal({name: case for name, case in cases.items() if name != "cut_call"})
    # the text before a call ends with the line break there, and without it here
    assert rest == {name: (["trace messages"], []) for name in called}
    assert all(case["sampling"] == [] for case in cases.values())
    assert {name: case["stops"] for name, case in cases.items() if case["stops"][0] != case["stops"][1]} == {
        name: [["max_output_tokens"], ["agent_completed"]] for name in ("cut", "cut_call")
    }
    arrays = {"token_ids", "mask", "logprobs", "temperatures", "advantages", "rl_weights"}
    assert {f"sample {name}" for name in arrays} <= {*cases["stop"]["names"]}
    assert {"micro-batch position_ids", "micro-batch loss_mask"} <= {*cases["stop"]["names"]}
    assert all(len({*cases[name]["rewards"]}) == 2 for name in ("stop", "stop_filtered"))
    assert all(case["samples"] == [4, 4] for case in cases.values())


def test_engine_of_rllm_makes_the_same_batch(run: Program, engine: str, model_text: Path, trainers: Path) -> None:
    source = trainers / "rllm"
    if not (source / "rllm").exists():
        absent(f"the source of rLLM is not in {source}: tests/trainers/environment.sh could not fetch it")
    cases = run("own_loops/rllm_own_loops", engine, model_text, path=source)
    assert len(cases) == 7
    # rLLM's engine marks each flow that returns as done
    assert unequal(cases) == {name: (["termination"], []) for name in ("cut", "cut_call", "one_turn")}
    for name in ("cut", "cut_call"):
        assert cases[name]["ends"] == [["MAX_RESPONSE_LENGTH_EXCEEDED"], ["ENV_DONE"]]
    assert cases["one_turn"]["ends"] == [["MAX_TURNS_EXCEEDED"], ["ENV_DONE"]]
    arrays = {"input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs", "advantages"}
    assert arrays <= {*cases["tool"]["names"]}
    turn, observation, _ = cases["tool"]["lengths"]
    assert cases["spaced"]["lengths"][:2] == [turn + 2, observation]
    assert cases["one_turn"]["lengths"] == [turn]
    assert len({*cases["stop"]["rewards"]}) == 2

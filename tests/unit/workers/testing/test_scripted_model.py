from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from workers.testing.scripted_model import DONE, GIVE_UP, Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn


def branch(name: str, weight: float = 1.0) -> Branch:
    call = ScriptedCall(name="python", arguments={"code": f"'{name}'"})
    return Branch(
        name=name, weight=weight, turns=(ScriptedTurn(content="look", tool_calls=(call,)), ScriptedTurn(content=name))
    )


PROBLEMS = [ScriptedProblem(match="2 + 2", branches=(branch("right"), branch("wrong"), branch("rare", 0.5)))]
ARGUMENTS = '{ "code":"\'right\'" }'
PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]


def message(turn: ScriptedTurn) -> dict[str, Any]:
    calls = [{"id": "x", "function": {"name": call.name, "arguments": call.text}} for call in turn.tool_calls]
    return {"role": "assistant", "content": turn.content or None, **({"tool_calls": calls} if calls else {})}


def branch_of(script: Script, seed: int | None) -> str:
    """Return the text of the second turn, which is the name of the scripted run."""
    first = script.next_turn(PROMPT, seed)
    history = [*PROMPT, message(first), {"role": "tool", "tool_call_id": "x", "content": "..."}]
    second = script.next_turn(history, seed)
    assert first.tool_calls[0].text == json.dumps({"code": f"'{second.content}'"})
    assert script.next_turn([*history, message(second)], seed) == DONE
    return second.content


def test_run_continues_as_it_began() -> None:
    script = Script(PROBLEMS)
    assert {branch_of(script, seed) for seed in range(40)} == {"right", "wrong", "rare"}
    assert {branch_of(script, None) for _ in range(40)} == {"right", "wrong", "rare"}


def test_seed_decides_whatever_came_before() -> None:
    first, second = Script(PROBLEMS, seed=3), Script(PROBLEMS, seed=3)
    branch_of(second, 99)
    assert [branch_of(first, seed) for seed in range(10)] == [branch_of(second, seed) for seed in range(10)]


def test_runs_are_drawn_by_their_weights() -> None:
    counts = Counter(branch_of(Script(PROBLEMS), seed) for seed in range(500))
    assert 160 < counts["right"] < 240
    assert 60 < counts["rare"] < 140


def test_unknown_problems_and_unknown_histories_are_given_up() -> None:
    script = Script(PROBLEMS)
    assert script.next_turn([{"role": "user", "content": "What is 3 + 3?"}], 0) == GIVE_UP
    assert script.next_turn([*PROMPT, {"role": "assistant", "content": "who knows"}], 0) == GIVE_UP


def test_longest_match_is_chosen() -> None:
    longer = ScriptedProblem(
        match="What is 2 + 2?", branches=(Branch(name="long", turns=(ScriptedTurn(content="long"),)),)
    )
    assert Script([*PROBLEMS, longer]).next_turn(PROMPT, 0).content == "long"


@pytest.mark.parametrize(
    "again",
    [
        message(PROBLEMS[0].branches[0].turns[0]),
        {
            "role": "assistant",
            "content": "look\n",
            "tool_calls": [{"function": {"name": "python", "arguments": ARGUMENTS}}],
        },
    ],
)
def test_turn_is_recognized_in_any_equivalent_form(again: dict[str, Any]) -> None:
    assert PROBLEMS[0].branches[0].turns[0].matches(again)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "look"},
        {
            "role": "assistant",
            "content": "looks",
            "tool_calls": [{"function": {"name": "python", "arguments": ARGUMENTS}}],
        },
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [{"function": {"name": "bash", "arguments": ARGUMENTS}}],
        },
        {"role": "assistant", "content": "look", "tool_calls": [{"function": {"name": "python", "arguments": "{}"}}]},
    ],
)
def test_different_turn_is_not_recognized(other: dict[str, Any]) -> None:
    assert not PROBLEMS[0].branches[0].turns[0].matches(other)


def test_reasoning_may_be_missing_in_the_history() -> None:
    turn = ScriptedTurn(content="look", reasoning="hm")
    assert turn.text == "<think>\nhm\n</think>\n\nlook"
    assert turn.matches({"role": "assistant", "content": "look"})


def test_begun_turn_is_continued() -> None:
    begun = branch("rare").turns[0].text[:-17]
    script = Script(PROBLEMS)
    assert [script.next_turn(PROMPT, seed, begun) for seed in range(10)] == [branch("rare").turns[0]] * 10
    assert script.next_turn(PROMPT, 0, "never said") == GIVE_UP

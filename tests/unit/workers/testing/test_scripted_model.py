from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from workers.testing.scripted_model import DONE, GIVE_UP, Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn


def play(name: str, weight: float = 1.0) -> Branch:
    call = ScriptedCall(name="python", arguments={"code": f"'{name}'"})
    return Branch(
        name=name, weight=weight, turns=(ScriptedTurn(content="look", tool_calls=(call,)), ScriptedTurn(content=name))
    )


BOOK = [ScriptedProblem(match="2 + 2", branches=(play("right"), play("wrong"), play("rare", 0.5)))]
ARGUMENTS = '{ "code":"\'right\'" }'
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


def message(turn: ScriptedTurn) -> dict[str, Any]:
    calls = [{"id": "x", "function": {"name": call.name, "arguments": call.text}} for call in turn.tool_calls]
    return {"role": "assistant", "content": turn.content or None, **({"tool_calls": calls} if calls else {})}


def whole_play(book: Script, seed: int | None) -> str:
    """Return the text of the second turn, which is the name of the scripted run."""
    first = book.next_turn(ASKED, seed)
    history = [*ASKED, message(first), {"role": "tool", "tool_call_id": "x", "content": "..."}]
    second = book.next_turn(history, seed)
    assert first.tool_calls[0].text == json.dumps({"code": f"'{second.content}'"})
    assert book.next_turn([*history, message(second)], seed) == DONE
    return second.content


def test_run_continues_as_it_began() -> None:
    book = Script(BOOK)
    assert {whole_play(book, seed) for seed in range(40)} == {"right", "wrong", "rare"}
    assert {whole_play(book, None) for _ in range(40)} == {"right", "wrong", "rare"}


def test_seed_decides_whatever_came_before() -> None:
    first, second = Script(BOOK, seed=3), Script(BOOK, seed=3)
    whole_play(second, 99)
    assert [whole_play(first, seed) for seed in range(10)] == [whole_play(second, seed) for seed in range(10)]


def test_runs_are_drawn_by_their_weights() -> None:
    counts = Counter(whole_play(Script(BOOK), seed) for seed in range(500))
    assert 160 < counts["right"] < 240
    assert 60 < counts["rare"] < 140


def test_unknown_problems_and_unknown_histories_are_given_up() -> None:
    book = Script(BOOK)
    assert book.next_turn([{"role": "user", "content": "What is 3 + 3?"}], 0) == GIVE_UP
    assert book.next_turn([*ASKED, {"role": "assistant", "content": "who knows"}], 0) == GIVE_UP


def test_longest_match_is_chosen() -> None:
    longer = ScriptedProblem(
        match="What is 2 + 2?", branches=(Branch(name="long", turns=(ScriptedTurn(content="long"),)),)
    )
    assert Script([*BOOK, longer]).next_turn(ASKED, 0).content == "long"


@pytest.mark.parametrize(
    "again",
    [
        message(BOOK[0].branches[0].turns[0]),
        {
            "role": "assistant",
            "content": "look\n",
            "tool_calls": [{"function": {"name": "python", "arguments": ARGUMENTS}}],
        },
    ],
)
def test_turn_is_recognized_in_any_equivalent_form(again: dict[str, Any]) -> None:
    assert BOOK[0].branches[0].turns[0].matches(again)


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
    assert not BOOK[0].branches[0].turns[0].matches(other)


def test_reasoning_may_be_missing_in_the_history() -> None:
    turn = ScriptedTurn(content="look", reasoning="hm")
    assert turn.text == "<think>\nhm\n</think>\n\nlook"
    assert turn.matches({"role": "assistant", "content": "look"})


def test_begun_turn_is_continued() -> None:
    begun = play("rare").turns[0].text[:-17]
    book = Script(BOOK)
    assert [book.next_turn(ASKED, seed, begun) for seed in range(10)] == [play("rare").turns[0]] * 10
    assert book.next_turn(ASKED, 0, "never said") == GIVE_UP

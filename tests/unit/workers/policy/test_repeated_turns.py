"""Repetition by a policy: which turns are equal, and how many of them are too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from pydantic import ValidationError

from farm.records.request import Limits
from farm.records.trajectory import Message
from workers.policy.recording import RepeatedTurns, conversation_repeats
from workers.testing import answering, calling

Turn = tuple[Message, Sequence[str]]
_ids = count()


def called(arguments: Any = '{"command": "ls"}', *observed: str, name: str = "bash", content: str = "") -> Turn:
    """A turn of one call with its own id."""
    message = calling((name, arguments), content=content).response
    message["tool_calls"][0]["id"] = f"call_{next(_ids)}"
    return message, observed or ("a.py",)


def spoken(text: str, *observed: str) -> Turn:
    return answering(text).response, observed or ("Go on.",)


def reached(turns: Sequence[Turn], most: int | None) -> list[int]:
    """Return the numbers of the turns that reach the limit, by both ways to check it."""
    repeated = RepeatedTurns(most)
    one_by_one = [n for n, turn in enumerate(turns, start=1) if repeated.repeat_with(*turn)]
    conversations = [n for n in range(1, len(turns) + 1) if conversation_repeats(list(messages(turns[:n])), most)]
    assert one_by_one == conversations
    return one_by_one


def messages(turns: Sequence[Turn]) -> Iterator[Message]:
    yield {"role": "system", "content": "You have a shell."}
    yield {"role": "user", "content": "List it."}
    for answer, observations in turns:
        yield answer
        for text in observations:
            yield {"role": "tool" if answer.get("tool_calls") else "user", "content": text}


LS = '{"command": "ls"}'
PWD = '{"command": "pwd"}'


@pytest.mark.parametrize("most", [2, 3, 4, 7, 300])
def test_equal_turns_reach_the_limit(most: int) -> None:
    assert reached([called()] * (most + 1), most) == [most, most + 1]


@pytest.mark.parametrize("most", [2, 4])
def test_equal_turns_must_be_consecutive(most: int) -> None:
    row = [called()] * (most - 1)
    assert reached([*row, called(PWD), *row, spoken("so"), *row], most) == []
    assert reached([*row, called(PWD), *row, called()], most) == [2 * most]


def test_without_a_limit_there_is_no_repetition() -> None:
    assert reached([called()] * 50, None) == []


@pytest.mark.parametrize("most", [4, 10])
def test_six_turns_that_alternate_between_two_reach_the_limit(most: int) -> None:
    turns = [called(LS), called(PWD, "/work")] * 4
    assert reached(turns, most) == [6, 7, 8]
    assert reached([called("{}"), called("[]"), *turns], most) == [8, 9, 10]


@pytest.mark.parametrize(
    "turns",
    [
        [called(LS), called(PWD)] * 2 + [called(LS), called("{}")],
        [called(LS), called(PWD), called("{}")] * 4,
        [called(LS), called(LS), called(PWD)] * 4,
        [called(LS), called(PWD, "1"), called(LS), called(PWD, "2"), called(LS), called(PWD, "1")],
    ],
)
def test_other_patterns_are_not_repetitions(turns: list[Turn]) -> None:
    assert reached(turns, 4) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (called('{"a": 1, "b": {"c": [1, 2], "d": "x"}}'), called('{"b":{"d":"\\u0078","c":[1,2]},\n "a":1}')),
        (called(""), called("{}")),
        (called("{a: 1"), called("{a: 1")),
        (called("[" * 100_000), called("[" * 100_000)),
        (called(LS, content="First I look."), called(LS, content="I look once more.")),
        (spoken("So."), spoken("\nSo.\n")),
        (spoken("\ud800"), spoken("\ud800")),
    ],
    ids=["order", "no-arguments", "no-json", "deep", "other-text", "blanks", "half-a-surrogate"],
)
def test_turns_are_equal(one: Turn, other: Turn) -> None:
    assert reached([one, other], 2) == [2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (called(LS), called(PWD)),
        (called(LS), called(LS, name="shell")),
        (called(LS, "a.py"), called(LS, "b.py")),
        (called(LS, "a.py"), called(LS, "a.py", "")),
        (called(LS, "ab", "c"), called(LS, "a", "bc")),
        (called("{a: 1"), called("{a:1")),
        (called('{"a": [1, 2]}'), called('{"a": [2, 1]}')),
        (called('{"a": "1"}'), called('{"a": 1}')),
        (spoken("So."), spoken("And so.")),
        (spoken("So.", "Go on."), spoken("So.", "Stop.")),
        (spoken(LS, "a.py"), called(LS, "a.py")),
    ],
)
def test_turns_are_different(one: Turn, other: Turn) -> None:
    assert reached([one, other], 2) == []
    assert reached([one, other, other], 2) == [3]


def test_additional_call_is_another_turn() -> None:
    both = calling(("bash", LS), ("bash", PWD)).response, ("a.py", "/work")
    swapped = calling(("bash", PWD), ("bash", LS)).response, ("/work", "a.py")
    assert reached([called(LS), both, swapped], 2) == []
    assert reached([called(LS), both, both], 2) == [3]


def test_answer_that_ends_a_conversation_is_not_a_turn_yet() -> None:
    sent = list(messages([called()] * 3))
    assert not conversation_repeats(sent[:-1], 3)
    assert conversation_repeats(sent, 3)
    assert not conversation_repeats([], 2)


def test_answer_that_a_program_sends_in_parts_is_one_turn() -> None:
    sent = [part for _ in range(4) for part in (answering("I look.").response, *messages([called()]))]
    sent = [message for message in sent if message["role"] in ("assistant", "tool")]
    assert [n for n in range(1, 5) if conversation_repeats(sent[: 3 * n], 4)] == [4]


def test_parts_of_a_message_are_compared() -> None:
    def conversation(*texts: str) -> list[Message]:
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in texts]
        return [message for part in parts for message in (answering("So.").response, part)]

    assert conversation_repeats(conversation("a", "a"), 2)
    assert not conversation_repeats(conversation("a", "b"), 2)


@pytest.mark.parametrize("given", [1, 0, -1, 1001])
def test_limit_of_one_turn_is_refused(given: int) -> None:
    with pytest.raises(ValidationError, match="max_repeats"):
        Limits(max_repeats=given)

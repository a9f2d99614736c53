"""Samples of one instance: the turn at which each diverges from the first."""

from __future__ import annotations

from farm.records.rollout import Rollout, Stage, State
from farm.records.trajectory import ModelCall
from farm.web.rollout_views import siblings
from tests.services.model_calls import model_call
from tests.unit.farm.web.test_token_view import segment


def rollout(sample: int) -> Rollout:
    return Rollout(
        f"b.0.{sample}",
        *(
            "b",
            0,
            sample,
            "math",
            "i",
            Stage.EVAL,
            State.COMPLETED,
            1,
            None,
            None,
            1.0,
            None,
            2,
            5,
            0.0,
            1.0,
            sample + 1,
        ),
    )


def saying(*texts: str) -> list[ModelCall]:
    return [model_call(at, response={"role": "assistant", "content": text}) for at, text in enumerate(texts)]


def test_sample_diverges_at_the_first_different_message() -> None:
    calls = [
        saying("a", "b", "c"),
        saying("a", "x", "c"),
        saying("a", "b", "c"),
        saying("a", "b"),
        saying(),
        saying("z"),
    ]
    made = siblings([rollout(at) for at in range(6)], calls, [()] * 6)
    assert [each.parts_at_turn for each in made] == [None, 1, None, 1, None, 0]
    assert [turn.parts for turn in made[1].turns] == [False, True, False]


def test_common_tokens_are_counted_from_the_first_response() -> None:
    first, second, other = segment([1, 2], [1, 1, 1]), segment([1, 2], [1, 1, 1]), segment([1, 3], [1, 1, 1])
    second.response_ids[2] = 7
    calls = [saying("a")] * 3
    made = siblings([rollout(at) for at in range(3)], calls, [[first], [second], [other]])
    assert [each.common_tokens for each in made] == [3, 2, 0]


def test_first_rollout_that_ran_is_the_reference() -> None:
    made = siblings([rollout(0), rollout(1), rollout(2)], [saying(), saying("a"), saying("b")], [()] * 3)
    assert [each.parts_at_turn for each in made] == [None, None, 0]

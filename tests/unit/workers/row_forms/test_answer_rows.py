"""Rows of the data sets as they are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workers.handlers.answer_handler import AnswerHandler, AnswerInstance
from workers.row_forms.patterns import sound_pattern

DATA = Path(__file__).parents[4] / "examples/data/answers"
MATH = ("dapo", "deepscaler", "nemo_gym_math", "polaris", "slime")
CHOICE = ("nemo_gym_mcqa", "supergpqa")
SHORT = ("prorl_stem", "webinstruct_verified")


def instances(form: str) -> list[AnswerInstance]:
    return [
        AnswerInstance.model_validate(json.loads(line)) for line in (DATA / f"{form}.jsonl").read_text().splitlines()
    ]


def test_a_problem_has_the_same_gold_answer_in_every_form() -> None:
    for forms in (MATH, CHOICE, SHORT):
        golds = [[instance.gold for instance in instances(form)] for form in forms]
        assert len(golds[0]) == 12
        assert golds == [golds[0]] * len(forms)


def test_only_short_answers_beyond_mathematics_need_a_judge() -> None:
    handler = AnswerHandler()
    needs = {form: {tuple(handler.roles(each)) for each in instances(form)} for form in (*MATH, *CHOICE, *SHORT)}
    assert needs == {form: {("judge",)} if form in SHORT else {()} for form in needs}


def test_the_policy_is_given_the_rows_own_prompt_and_never_the_gold_answer() -> None:
    handler = AnswerHandler()
    for form in (*MATH, *CHOICE, *SHORT):
        for instance in instances(form):
            messages = handler.messages(instance)
            assert messages[-1]["role"] == "user"
            if instance.prompt:
                assert messages == [dict(message) for message in instance.prompt]
            assert AnswerInstance.model_validate(instance.model_dump(mode="json")) == instance
    assert "B: 20 m" in str(handler.messages(instances("supergpqa")[0]))
    assert "24" not in str(handler.messages(instances("deepscaler")[0]))
    assert instances("nemo_gym_mcqa")[0].strict


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "no gold answer"),
        ({"answer": "1"}, "no question"),
        ({"question": "q", "answer": " "}, "no gold answer"),
        ({"question": "q", "answer": True}, "no gold answer"),
        ({"question": "q", "options": ["1", "2"], "answer": "3"}, "names none of the 2 options"),
        ({"question": "q", "gold": "Z", "options": ["1", "2"]}, "not the letter"),
        ({"question": "q", "gold": "1", "judge": {"n_votes": 2}}, "even number"),
        ({"question": "q", "gold": "1", "pattern": "(a+)+$"}, "repeats a repeat"),
        ({"question": "q", "gold": "1", "pattern": "("}, "no regular expression"),
        ({"question": "q", "gold": "1", "surprise": 1}, "surprise"),
        ({"prompt": [{"role": "tool", "content": "x"}], "label": "1"}, "no role"),
    ],
)
def test_bad_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AnswerInstance.model_validate(row)


def test_numbers_and_lists_of_one_are_gold_answers() -> None:
    assert AnswerInstance.model_validate({"problem": "q", "answer": 25}).gold == "25"
    row = {"prompt": "q", "reward_model": '{"ground_truth": ["#### 7"]}'}
    assert AnswerInstance.model_validate(row).gold == "7"


def test_a_pattern_of_one_repeat_is_sound() -> None:
    assert sound_pattern(r"(?i)answer:\s*\(?([A-J])\)?") != ""

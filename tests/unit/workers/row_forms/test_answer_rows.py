"""Rows of the data sets unchanged, and refused rows."""

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


def test_problem_has_the_same_gold_answer_in_every_form() -> None:
    for forms in (MATH, CHOICE, SHORT):
        golds = [[instance.gold for instance in instances(form)] for form in forms]
        assert len(golds[0]) == 12
        assert golds == [golds[0]] * len(forms)


def test_only_short_answers_outside_mathematics_need_a_judge() -> None:
    needs = {
        form: {tuple(AnswerHandler(each).roles()) for each in instances(form)} for form in (*MATH, *CHOICE, *SHORT)
    }
    assert needs == {form: {("judge",)} if form in SHORT else {()} for form in needs}


def test_policy_gets_the_rows_own_prompt_and_never_the_gold_answer() -> None:
    for form in (*MATH, *CHOICE, *SHORT):
        for instance in instances(form):
            messages = AnswerHandler(instance).messages()
            assert messages[-1]["role"] == "user"
            if instance.prompt:
                assert messages == [dict(message) for message in instance.prompt]
            assert AnswerInstance.model_validate(instance.model_dump(mode="json")) == instance
    assert "B: 20 m" in str(AnswerHandler(instances("supergpqa")[0]).messages())
    assert "24" not in str(AnswerHandler(instances("deepscaler")[0]).messages())
    assert instances("nemo_gym_mcqa")[0].rule == "strict_single_letter_boxed"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "no gold answer"),
        ({"answer": "1"}, "no question"),
        ({"question": "q", "answer": " "}, "neither a text nor a number"),
        ({"question": "q", "answer": True}, "neither a text nor a number"),
        ({"question": "q", "answer": ["1", {"x": 1}]}, "neither a text nor a number"),
        ({"question": "q", "answer": []}, "no gold answer"),
        ({"question": "q", "answer": "1", "images": [{"bytes": "x"}]}, "`images`"),
        ({"question": "q", "gold": "1", "rule": "no such"}, "unknown rule"),
        ({"prompt": "q", "label": "1", "rm_type": "ifbench"}, "unknown rm_type 'ifbench' of the row"),
        ({"prompt": "q", "label": "1", "metadata": {"rm_type": "remote_rm"}}, "rm_type 'remote_rm'"),
        ({"prompt": "q", "label": "1", "rm_type": "boxed_math"}, "rm_type 'boxed_math' of the row; known are: f1"),
        ({"prompt": "q", "label": "x", "rm_type": "dapo"}, "reads only numbers"),
        (
            {"prompt": "q", "label": "3", "rm_type": "gpqa", "metadata": {"choices": ["1", "2"]}},
            "none of the 2 options",
        ),
        ({"prompt": "q", "label": 7, "rm_type": "gpqa", "metadata": {"choices": ["1", "2"]}}, "none of the 2 options"),
        ({"prompt": "q", "rm_type": "gpqa"}, "names none of the 10 options"),
        ({"prompt": "q", "label": "B", "rm_type": "gpqa", "metadata": {"valid_letters": ["B", "C"]}}, "first letters"),
        ({"prompt": "q", "label": "B", "rm_type": "gpqa", "metadata": {"choices": "12"}}, "choices is a text"),
        ({"question": "q", "gold": "1", "rule": "lenient_boxed"}, "there are none"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "label": "1"}, "type 'image_url'"),
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [{}]}], "label": "1"}, "calls a tool"),
        ({"prompt": ["x"], "label": "1"}, "not an object"),
        ({"question": "q", "options": ["1", "2"], "answer": "3"}, "names none of the 2 options"),
        ({"question": "q", "gold": "Z", "options": ["1", "2"]}, "not the letter"),
        ({"question": "q", "gold": "1", "judge": {"n_votes": 2}}, "even number"),
        ({"question": "q", "gold": "1", "pattern": "(a+)+$"}, "nests repeats"),
        ({"question": "q", "gold": "1", "pattern": "("}, "not a regular expression"),
        ({"question": "q", "gold": "1", "other_patterns": ["a", "(a+)+$"]}, "nests repeats"),
        ({"question": "q", "gold": "1", "surprise": 1}, "surprise"),
        ({"prompt": [{"role": "tool", "content": "x"}], "label": "1"}, "is a tool's"),
        ({"prompt": [{"role": "critic", "content": "x"}], "label": "1"}, "no role"),
    ],
)
def test_invalid_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AnswerInstance.model_validate(row)


CAPITALS = ["Rome", "Oslo", "Paris", "Bonn"]


@pytest.mark.parametrize(
    ("fields", "gold"),
    [
        ({"choices": CAPITALS, "answer": 2}, "C"),
        ({"choices": CAPITALS, "answer": 0}, "A"),
        ({"choices": CAPITALS, "answer": "3"}, "D"),
        ({"choices": CAPITALS, "answer": "C"}, "C"),
        ({"choices": CAPITALS, "answer": "Paris"}, "C"),
        ({"choices": ["1", "2", "3", "4"], "answer": 2}, "C"),
        ({"choices": ["1", "2", "3", "4"], "answer": "2"}, "B"),
        ({"choices": {"text": CAPITALS, "label": ["A", "B", "C", "D"]}, "answerKey": "B"}, "B"),
        ({"choices": {"text": CAPITALS, "label": ["1", "2", "3", "4"]}, "answerKey": "1"}, "A"),
        ({"choices": CAPITALS, "answer": 4}, ""),
        ({"choices": CAPITALS, "answer": -1}, ""),
        ({"choices": CAPITALS, "answer": "Berlin"}, ""),
    ],
)
def test_choices_are_options(fields: dict[str, Any], gold: str) -> None:
    row = {"question": "Which is the capital of France?", **fields}
    if not gold:
        with pytest.raises(ValidationError, match="names none of the 4 options"):
            AnswerInstance.model_validate(row)
        return
    instance = AnswerInstance.model_validate(row)
    assert (instance.gold, len(instance.options)) == (gold, 4)


def test_numbers_and_single_element_lists_are_gold_answers() -> None:
    assert AnswerInstance.model_validate({"problem": "q", "answer": 25}).gold == "25"
    row = {"prompt": "q", "reward_model": '{"ground_truth": ["#### 7"]}'}
    assert AnswerInstance.model_validate(row).gold == "7"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}, "gsm8k"),
        ({"data_source": "me/my_GSM8K", "reward_model": {"ground_truth": "72"}}, "gsm8k"),
        (
            {"data_source": "DigitalLearningGmbH/MATH-lighteval", "reward_model": {"ground_truth": "72"}},
            "hendrycks_math",
        ),
        ({"data_source": "math_dapo", "reward_model": {"ground_truth": "72"}}, "dapo"),
        ({"data_source": "aime2024", "reward_model": {"ground_truth": "72"}}, "dapo"),
        ({"data_source": "searchR1_nq", "reward_model": {"ground_truth": {"target": ["72"]}}}, "search_r1"),
        ({"data_source": "numina_cn_k12", "reward_model": {"ground_truth": "72"}}, "prime_math"),
        ({"data_source": "numina_other", "reward_model": {"ground_truth": "72"}}, ""),
        ({"data_source": "another", "reward_model": {"ground_truth": "72"}}, ""),
        ({"env_class": "gsm8k", "reward_model": {"ground_truth": "72"}}, "skyrl_gsm8k"),
        ({"env_class": "aime", "reward_model": {"ground_truth": "72"}}, "skyrl_aime"),
        ({"rule": "gsm8k_flexible", "answer": "72"}, "gsm8k_flexible"),
        ({"answer": "72"}, ""),
        ({"label": "72", "rm_type": "f1"}, "slime_f1"),
        ({"label": "72", "metadata": {"rm_type": "math"}}, "slime_math"),
        ({"label": 72, "rm_type": " deepscaler "}, "slime_deepscaler"),
        ({"label": "72", "rm_type": "f1", "metadata": {"rm_type": "boxed_dapo"}}, "slime_boxed_dapo"),
        ({"label": "72", "rm_type": "random", "rule": "gsm8k"}, "gsm8k"),
        ({"label": "72", "rm_type": "", "metadata": None}, ""),
    ],
)
def test_row_selects_the_rule_of_its_authors(row: dict[str, Any], rule: str) -> None:
    assert AnswerInstance.model_validate({"prompt": "q", **row}).rule == rule


@pytest.mark.parametrize(
    ("template", "pattern", "others", "prefix"),
    [
        ({"output_regex": "a(.)"}, "a(.)", (), ""),
        ({"output_regex": ["a(.)", "b(.)"], "answer_prefix": "So:"}, "a(.)", ("b(.)",), "So:"),
        ({"output_regex": [], "answer_prefix": ""}, "", (), ""),
        (None, "", (), ""),
    ],
)
def test_row_has_the_patterns_and_the_prefix_of_its_template(
    template: Any, pattern: str, others: tuple[str, ...], prefix: str
) -> None:
    instance = AnswerInstance.model_validate({"question": "q", "answer": "1", "template_metadata": template})
    assert (instance.pattern, instance.other_patterns, instance.prefix) == (pattern, others, prefix)


@pytest.mark.parametrize(
    ("label", "metadata", "gold", "options"),
    [
        ("b", {}, "B", tuple("ABCDEFGHIJ")),
        ("B", {"valid_letters": ["a", "b"]}, "B", ("A", "B")),
        (1, {"choices": {"A": "1 m", "B": "2 m"}}, "B", ("1 m", "2 m")),
        ("2 M.", {"choices": ["1 m", "2 m"]}, "B", ("1 m", "2 m")),
        ("A", {"choices": ["1 m", "2 m"], "correct_letter": "b"}, "B", ("1 m", "2 m")),
        (None, {"correct_letter": " b "}, "B", tuple("ABCDEFGHIJ")),
        ("E. coli", {}, "E. coli", ()),
    ],
)
def test_row_of_slime_names_its_option(
    label: Any, metadata: dict[str, Any], gold: str, options: tuple[str, ...]
) -> None:
    row = {"problem": "Which?", "label": label, "metadata": {**metadata, "rm_type": "gpqa"}}
    instance = AnswerInstance.model_validate(row)
    assert (instance.gold, instance.options) == (gold, options)
    shown = AnswerHandler(instance).messages()[0]["content"]
    assert ("A: A" in shown, "A: 1 m" in shown) == (False, "choices" in metadata)


@pytest.mark.parametrize(
    ("given", "golds"),
    [
        ("It is 40 + 32 = <<40+32=72>>72.\n#### 72", ("72",)),
        ('["42"]', ("42",)),
        (["42", "42.0"], ("42", "42.0")),
        ({"target": ["Obama", "Barack Obama"]}, ("Obama", "Barack Obama")),
        ("[1, 2]", ("[1, 2]",)),
        ("####", ("####",)),
    ],
)
def test_gold_answers_are_unwrapped(given: Any, golds: tuple[str, ...]) -> None:
    instance = AnswerInstance.model_validate({"prompt": "q", "reward_model": {"ground_truth": given}})
    assert (instance.gold, *instance.other_golds) == golds


def test_prompt_as_json_text_is_parsed() -> None:
    prompt = '[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]'
    instance = AnswerInstance.model_validate({"prompt": prompt, "label": "1"})
    assert instance.prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    assert AnswerInstance.model_validate({"prompt": "[{x}]", "label": "1"}).question == "[{x}]"


def test_pattern_with_one_repeat_is_safe() -> None:
    assert sound_pattern(r"(?i)answer:\s*\(?([A-J])\)?") != ""

"""Rows of data sets, unchanged, get the farm's score and their authors' score; the batch chooses which counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from farm.rows import read_rows
from tests.integration.answers.conftest import no_sandbox
from workers.handlers.answer_handler import AnswerHandler, AnswerInstance
from workers.plugins import plugin_values
from workers.plugins.interfaces import Score, Submission

Scored = Callable[..., tuple[Score, ...]]
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {"role": "user", "content": f"Natalia sold 48 clips, and then half as many. How many in all? {INSTRUCTION}"}
    ],
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
SKYRL = {"prompt": VERL["prompt"], "reward_spec": {"method": "rule", "ground_truth": "72"}}
RAW = {"question": "How many in all?", "answer": "48 + 24 = <<48+24=72>>72 clips.\n#### 72"}
DAPO = {**VERL, "data_source": "math_dapo"}
SEARCH = {**VERL, "data_source": "searchR1_nq", "reward_model": {"ground_truth": {"target": ["Obama", "Barack Obama"]}}}
NUMINA = {**VERL, "data_source": "numina_olympiads", "reward_model": {"style": "rule", "ground_truth": "2\\pi"}}
FACT = {"prompt": "Who?", "label": "Barack Obama", "metadata": {"rm_type": "f1"}}
VALUE = {"prompt": "q", "label": "x+1", "metadata": {"rm_type": "math"}}
OPTION = {"prompt": "A) 10 m B) 20 m", "label": "B", "metadata": {"rm_type": "gpqa", "answer_text": "20 m"}}
CHOICE = {
    "responses_create_params": {"input": [{"role": "user", "content": "Which?"}]},
    "agent_ref": {"name": "mcqa_simple_agent"},
    "options": [{"A": "10 m"}, {"B": "20 m"}],
    "expected_answer": "B",
}

PICKED = {
    **CHOICE,
    "grading_mode": "lenient_answer_colon_md",
    "template_metadata": {"answer_prefix": "My pick is", "output_regex": [r"pick=(\w)", r"choose (.+)"]},
}


@pytest.fixture(scope="module")
def scored() -> Iterator[Scored]:
    """Yield a function that scores a response once, as a batch that counts the reward of each of these names would.

    All share an event loop, and so a grader.
    """
    with asyncio.Runner() as loop:

        def once(
            folder: Path, form: str, row: dict[str, Any], response: str, *rules: str, **given: str
        ) -> tuple[Score, ...]:
            path = folder / "rows.jsonl"
            path.write_text(json.dumps(row))
            (instance,) = read_rows(path, form, given=given).instances
            evaluator = AnswerHandler(AnswerInstance.model_validate(instance.fields)).evaluator()
            found = loop.run(evaluator.evaluate(Submission(answer=response), no_sandbox, 240.0))
            return tuple(plugin_values.score(found, "an evaluator", rule) for rule in rules)

        yield once


@pytest.mark.parametrize(
    ("form", "row", "response", "farm", "authors"),
    [
        ("verl", VERL, "48 + 24 = 72\n#### 72", 1.0, 1.0),
        ("verl", VERL, "#### 72\nThat is all.", 1.0, 1.0),
        ("verl", VERL, "#### $72", 1.0, 0.0),
        ("verl", VERL, "#### 71", 0.0, 0.0),
        ("verl", VERL, "\\boxed{72}", 1.0, 0.0),
        ("verl", VERL, "", 0.0, 0.0),
        ("skyrl", SKYRL, "#### 72", 1.0, 1.0),
        ("verl", DAPO, "\\boxed{7}\nAnswer: $72$", 1.0, 1.0),
        ("verl", DAPO, "Answer: 71", 0.0, -1.0),
        ("verl", DAPO, "\\boxed{72}\nAnswer: 71", 0.0, -1.0),
        ("verl", DAPO, "Answer: 72 km", 1.0, 1.0),
        ("verl", SEARCH, "<answer>the barack obama!</answer>", 1.0, 1.0),
        ("verl", SEARCH, "<answer>Michelle Obama</answer>", 0.0, 0.0),
        ("verl", NUMINA, "Step 2: so $\\boxed{2 \\pi}$.", 1.0, 1.0),
        ("verl", NUMINA, "So it goes.\nThe answer is 2\\pi. As was said", 1.0, 1.0),
        ("verl", NUMINA, "\\boxed{6.28}", 0.0, 1.0),
        ("verl", NUMINA, "\\boxed{A = 2\\pi, as B = 7}", 0.0, 0.0),
        ("verl", NUMINA, "\\boxed{3\\pi}", 0.0, 0.0),
        ("verl", NUMINA, "\\boxed{\\pi + 9**9**9**9}", 0.0, 0.0),
        ("verl", NUMINA, "\\boxed{().__class__ + \\pi}", 0.0, 0.0),
        ("verl", NUMINA, "\\boxed{2(1+\\pi)}", 0.0, 0.0),
        ("verl", NUMINA, "\\pi" * 20_000, 0.0, 0.0),
        ("verl", NUMINA, "", 0.0, 0.0),
        ("nemo-gym", CHOICE, "\\boxed{\\text{B}}", 1.0, 1.0),
        ("nemo-gym", CHOICE, "\\boxed{20 m}", 1.0, 0.0),
        ("nemo-gym", CHOICE, "\\boxed{B: 10 m}", 0.0, 1.0),
        ("nemo-gym", PICKED, "So it is.\nMy pick is (B)", 1.0, 1.0),
        ("nemo-gym", PICKED, "So it is.\nmy pick is A", 0.0, 0.0),
        ("nemo-gym", PICKED, "I choose 20 m", 1.0, 1.0),
        ("nemo-gym", PICKED, "I choose 20 m, pick=A", 0.0, 0.0),
        ("nemo-gym", PICKED, "My pick is A\npick=B", 1.0, 1.0),
        ("nemo-gym", PICKED, "My pick is " * 50_000, 0.0, 0.0),
        ("answer", FACT, "The Barack Obama!", 1.0, 1.0),
        ("answer", FACT, "Michelle Obama", 0.0, 0.5),
        ("answer", FACT, "Obama Barack", 0.0, 1.0),
        ("answer", VALUE, "\\boxed{1 + x}", 1.0, 1.0),
        ("answer", VALUE, "\\boxed{x + 2}", 0.0, 0.0),
        ("answer", VALUE, "\\boxed{x+1 \\text{ cm}}", 1.0, 1.0),
        ("answer", VALUE, "Answer: x+1", 1.0, 0.0),
        ("answer", VALUE, "\\boxed{9**9**9**9}", 0.0, 0.0),
        ("answer", VALUE, "\\boxed{().__class__}", 0.0, 0.0),
        ("answer", VALUE, "\\boxed{" + "{" * 50_000 + "}" * 50_001, 0.0, 0.0),
        ("answer", {**VALUE, "rm_type": "math", "metadata": None}, "\\boxed{1+x}", 1.0, 1.0),
        ("answer", {**VALUE, "metadata": {"rm_type": "deepscaler"}}, "a</think>\\boxed{1+x}", 1.0, 1.0),
        ("answer", {**VALUE, "metadata": {"rm_type": "deepscaler"}}, "\\boxed{1+x}", 1.0, 0.0),
        ("answer", OPTION, "The answer is B", 1.0, 1.0),
        ("answer", OPTION, "Answer: B: 20 m", 1.0, 1.0),
        ("answer", OPTION, "Option A is wrong. \\boxed{B}", 1.0, 0.0),
        ("answer", OPTION, "\\boxed{20 m}", 1.0, 1.0),
        ("answer", OPTION, "Both may be.", 0.0, 1.0),
        ("answer", OPTION, "", 0.0, 0.0),
    ],
)
def test_score_of_the_farm_and_of_the_authors_are_both_returned(
    scored: Scored, tmp_path: Path, form: str, row: dict[str, Any], response: str, farm: float, authors: float
) -> None:
    given = {"env_class": "gsm8k"} if form == "skyrl" else {}
    score, theirs = scored(tmp_path, form, row, response, "", "authors", **given)
    assert (score.value, score.rewards) == (farm, {"farm": farm, "authors": authors})
    assert score.details["authors"]["score"] == authors
    assert score.details.get("differs", False) is (farm != float(authors == 1.0))
    assert theirs.value == authors


def test_row_without_authors_has_only_the_farm_score(scored: Scored, tmp_path: Path) -> None:
    (score,) = scored(tmp_path, "answer", RAW, "\\boxed{72}", "")
    assert score == Score(1.0, {"answer": "72", "rule": "equal text"})
    with pytest.raises(EvaluatorError, match="gave no reward 'authors', which the batch counts"):
        scored(tmp_path, "answer", RAW, "\\boxed{72}", "authors")


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("11:00", "\\boxed{11:00}", 1.0),
        ("11:00", "\\boxed{1:00}", 0.0),
        ("2, 3", "the roots are \\boxed{2} and \\boxed{3}.", 1.0),
        ("2, 3", "the roots are \\boxed{2} and \\boxed{4}.", 0.0),
        ("2", "it is \\boxed{2} or \\boxed{3}.", 0.0),
        ("3", "\\boxed{3y}", 0.0),
        ("3", "\\boxed{3 m}", 1.0),
        ("CAB", "\\boxed{ABC}", 0.0),
        ("CAB", "\\boxed{\\text{CAB}}", 1.0),
    ],
)
def test_answers_from_public_bug_reports_are_graded_correctly(
    scored: Scored, tmp_path: Path, gold: str, response: str, value: float
) -> None:
    assert scored(tmp_path, "answer", {"question": "q", "answer": gold}, response, "")[0].value == value


def test_whole_numbers_are_compared_exactly(scored: Scored, tmp_path: Path) -> None:
    row = {"question": "q", "answer": "1000000007"}
    assert scored(tmp_path, "answer", row, "\\boxed{1,000,000,007}", "")[0].value == 1.0
    assert scored(tmp_path, "answer", row, "\\boxed{1000000008}", "")[0].value == 0.0
    assert scored(tmp_path, "answer", row, "\\boxed{1000000008 apples}", "")[0].value == 0.0
    assert scored(tmp_path, "answer", row, "\\boxed{1000000007.0}", "")[0].value == 1.0

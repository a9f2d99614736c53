"""Rows of the data sets as they are: the same problem has the same tests in every form."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workers.handlers.programs_handler import ProgramsHandler, ProgramsInstance
from workers.row_forms.fenced_blocks import fenced_program
from workers.row_forms.pickled_text import pickled_text

DATA = Path(__file__).parents[4] / "examples/data/programs"


def instances(form: str) -> list[ProgramsInstance]:
    lines = (DATA / f"{form}.jsonl").read_text().splitlines()
    return [ProgramsInstance.model_validate(json.loads(line)) for line in lines]


def packed(content: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


@pytest.mark.parametrize("form", ["apps", "nemo_gym", "verl"])
def test_a_problem_has_the_same_tests_in_every_form(form: str) -> None:
    expected, others = instances("livecodebench"), instances(form)
    assert len(others) in (5, 7)
    for one, other in zip(expected, others, strict=False):
        assert other.function == one.function
        for ours, theirs in zip(other.tests, one.tests, strict=True):
            assert (ours.stdin, ours.arguments) == (theirs.stdin, theirs.arguments)
            # in APPS values may be wrapped once more, so that a row expects either
            assert ours.expected == theirs.expected or theirs.expected[0] in ours.expected
        assert ProgramsInstance.model_validate(other.model_dump(mode="json")) == other


def test_mbpp_shows_its_first_assert_alone() -> None:
    for instance in instances("mbpp"):
        text = str(ProgramsHandler().messages(instance))
        assert instance.function in text
        assert (text.count("assert "), len(instance.asserts) > 1) == (1, True)


def test_contests_have_the_tests_of_all_kinds_and_more_time_for_python() -> None:
    tests = {"input": ["1\n"], "output": ["2\n"]}
    row = {
        "name": "own",
        "description": "Add one.",
        "public_tests": tests,
        "private_tests": tests,
        "generated_tests": {"input": [], "output": []},
        "time_limit": {"seconds": 2, "nanos": 500_000_000},
        "memory_limit_bytes": 256_000_000,
    }
    instance = ProgramsInstance.model_validate(row)
    assert (len(instance.tests), instance.time_s, instance.memory_mb) == (2, 7.5, 256)


def test_private_tests_may_be_a_pickled_text_and_nothing_that_runs() -> None:
    row = json.loads((DATA / "livecodebench.jsonl").read_text().splitlines()[0])
    plain = ProgramsInstance.model_validate(row)
    assert ProgramsInstance.model_validate(row | {"private_test_cases": packed(row["private_test_cases"])}) == plain

    class Evil:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('it ran')",)

    for evil in (Evil(), [Evil()], {"a": Evil()}, io.StringIO, ["no", "text"], 7):
        with pytest.raises(ValueError, match="pickle"):
            pickled_text(packed(evil))
    for broken in ("!", "AAAA", packed("x")[:-8], base64.b64encode(zlib.compress(b"")).decode()):
        with pytest.raises(ValueError, match=r"tests|cut off"):
            pickled_text(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": []}, "neither `tests` nor `asserts`"),
        ({"tests": [{"stdin": "1"}]}, "expected"),
        ({"tests": [{"stdin": "1", "expected": ["2"]}]}, "is a text beside"),
        ({"tests": [{"arguments": [1], "expected": [2]}]}, "need a `function`"),
        ({"function": "f", "tests": [{"arguments": [1], "expected": []}]}, "needs a `reference`"),
        ({"compare": "exact"}, "no way to compare"),
        ({"compare": "checker"}, "needs a `checker`"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_fields_are_refused(change: dict[str, Any], message: str) -> None:
    fields = {"question": "Echo.", "tests": [{"stdin": "1", "expected": "1"}]}
    ProgramsInstance.model_validate(fields)
    with pytest.raises(ValidationError, match=message):
        ProgramsInstance.model_validate(fields | change)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q"},
        {"question": "q", "input_output": "{}"},
        {"question": "q", "input_output": {"inputs": ["1"], "outputs": []}},
        {"question": "q", "test_list": []},
        {"question": "q", "test_list": ["assert 1 == 1"]},
        {"question": "q", "public_test_cases": "[]"},
        {"question": "q", "private_test_cases": "not base64"},
    ],
)
def test_rows_without_tests_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProgramsInstance.model_validate(row)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```cpp\na\n```", ""),
        ("<think>```python\na\n```</think>", ""),
        ("```python\na", ""),
        ("print(1)", ""),
        (None, ""),
    ],
)
def test_the_program_of_an_answer_is_its_last_block(answer: str | None, program: str) -> None:
    assert fenced_program(answer) == program

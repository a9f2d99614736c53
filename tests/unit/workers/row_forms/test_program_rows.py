"""Rows of the data sets unchanged: the same problem has the same tests in every form."""

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
from workers.row_forms.program_rows import packed_json, pickled_text

DATA = Path(__file__).parents[4] / "examples/data/programs"


def instances(form: str) -> list[ProgramsInstance]:
    lines = (DATA / f"{form}.jsonl").read_text().splitlines()
    return [ProgramsInstance.model_validate(json.loads(line)) for line in lines]


def packed(content: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


@pytest.mark.parametrize("form", ["apps", "nemo_gym", "verl"])
def test_problem_has_the_same_tests_in_every_form(form: str) -> None:
    expected, others = instances("livecodebench"), instances(form)
    assert len(others) in (5, 7)
    for one, other in zip(expected, others, strict=False):
        assert other.function == one.function
        for ours, theirs in zip(other.tests, one.tests, strict=True):
            assert (ours.stdin, ours.arguments) == (theirs.stdin, theirs.arguments)
            # in APPS values may be wrapped once more, so a row accepts either
            assert ours.expected == theirs.expected or theirs.expected[0] in ours.expected
        assert ProgramsInstance.model_validate(other.model_dump(mode="json")) == other


def test_mbpp_shows_only_its_first_assert() -> None:
    for instance in instances("mbpp"):
        text = str(ProgramsHandler(instance).messages())
        assert instance.function in text
        assert (text.count("assert "), len(instance.asserts) > 1) == (1, True)


def test_contests_have_tests_of_all_kinds_and_more_time_for_python() -> None:
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


def test_private_tests_may_be_a_pickled_text_without_code() -> None:
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
        with pytest.raises(ValueError, match=r"tests|truncated"):
            pickled_text(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": []}, "either `tests` or `asserts`"),
        ({"tests": [{"stdin": "1"}]}, "expected"),
        ({"tests": [{"stdin": "1", "expected": ["2"]}]}, "must be a text with"),
        ({"tests": [{"arguments": [1], "expected": [2]}]}, "need a `function`"),
        ({"function": "f", "tests": [{"arguments": [1], "expected": []}]}, "needs a `reference`"),
        ({"compare": "exact"}, "not a comparison mode"),
        ({"compare": "checker"}, "needs a `checker`"),
        ({"compare": "form"}, "needs the `rule`"),
        ({"rule": "mine"}, "is not a rule of a form"),
        ({"rule": "evalplus:mbpp:2"}, "the tolerance 2"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_invalid_fields_are_refused(change: dict[str, Any], message: str) -> None:
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
    ("form", "rule"),
    [("livecodebench", "livecodebench"), ("apps", "apps"), ("nemo_gym", "nemo_gym"), ("verl", "prime_code")],
)
def test_row_has_the_rule_of_its_form(form: str, rule: str) -> None:
    rules = {(instance.rule, instance.compare) for instance in instances(form)}
    assert rules == {(rule, "form")}
    row = json.loads((DATA / f"{form}.jsonl").read_text().splitlines()[0])
    assert ProgramsInstance.model_validate({**row, "compare": "tokens"}).compare == "tokens"


PAIRS = {"inputs": ["1"], "outputs": ["2"]}
LISTS = {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}
STREAM = [{"input": "1", "output": "2", "testtype": "stdin"}]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"question": "q", "input_output": PAIRS}, "apps"),
        ({"question": "q", "input_output": PAIRS, "raw_tags": "[]"}, "taco"),
        ({"question": "q", "reward_model": {"ground_truth": json.dumps(PAIRS)}}, "prime_code"),
        ({"question": "q", "reward_model": {"ground_truth": json.dumps(LISTS)}}, "apps"),
        ({"question": "q", "reward_spec": {"ground_truth": json.dumps(STREAM)}}, "skyrl_lcb"),
        ({"description": "q", "public_tests": {"input": ["1"], "output": ["2"]}}, "codecontests"),
        (
            {"task_id": "Mbpp/2", "prompt": "q", "entry_point": "f", "canonical_solution": "", "base_input": [[1]]},
            "evalplus:mbpp:0.0",
        ),
        (
            {
                "task_id": "HumanEval/32",
                "prompt": "q",
                "entry_point": "f",
                "canonical_solution": "",
                "base_input": [[1]],
                "atol": 1e-4,
            },
            "evalplus:humaneval:0.0001",
        ),
        ({"question": "q", "tests": [{"stdin": "1", "expected": "2"}]}, ""),
    ],
)
def test_columns_decide_the_rule(row: dict[str, Any], rule: str) -> None:
    assert ProgramsInstance.model_validate(row).rule == rule


def test_tests_of_nemo_gym_may_be_packed() -> None:
    def row(tests: Any) -> dict[str, Any]:
        return {"question": "q", "verifier_metadata": {"unit_tests": tests}}

    text = base64.b64encode(zlib.compress(json.dumps(PAIRS).encode())).decode()
    plain = ProgramsInstance.model_validate(row(PAIRS))
    assert ProgramsInstance.model_validate(row({"packed": text, "fn_name": None})) == plain
    for broken in ("!", text[:-8], base64.b64encode(zlib.compress(b"{")).decode()):
        with pytest.raises(ValueError, match=r"tests|truncated"):
            packed_json(broken)

"""Rows of data sets become instances of the right handler, or are refused with all their row numbers."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from farm.cli.request_files import for_rows
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest
from farm.rows import read_rows

MATH: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "How many positive divisors has 360?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "24", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "own-0000"},
}
TESTS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
SWE_ROW = {"instance_id": "a__b-1", "repo": "a/b"}
ROWS = Path(__file__).parents[4] / "examples/data/swe"

GYM = {"responses_create_params": {}, "expected_answer": "24", "question": "q"}


def written(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def prompted(text: str, **columns: Any) -> dict[str, Any]:
    return {**MATH, "prompt": [{"role": "user", "content": text}], **columns}


@pytest.mark.parametrize(
    ("form", "row", "data_source", "instance_id"),
    [
        ("verl", MATH, "answer", "own-0000"),
        ("verl", {**MATH, "extra_info": {"index": 7}}, "answer", "math_dapo-7"),
        ("verl", {**MATH, "data_source": "taco", "reward_model": {"ground_truth": TESTS}}, "programs", "own-0000"),
        ("verl", {**MATH, "data_source": "own", "reward_model": {"ground_truth": TESTS}}, "programs", "own-0000"),
        ("verl", {**MATH, "data_source": "swe-gym", "instance": SWE_ROW}, "swe-bench", "a__b-1"),
        ("dapo", MATH, "answer", "own-0000"),
        ("skyrl", {"prompt": "2+2", "env_class": "gsm8k", "reward_spec": {"ground_truth": "4"}}, "answer", None),
        ("skyrl", {"prompt": "x", "env_class": "lcb", "reward_spec": {"ground_truth": TESTS}}, "programs", None),
        ("skyrl", {"prompt": "x", "env_class": "gsm8k_multi_turn", "reward_spec": {}}, "environment", None),
        ("skyrl", {"prompt": "x", "env_class": "null", "instance": SWE_ROW}, "swe-bench", "a__b-1"),
        ("nemo-gym", {**GYM, "agent_ref": {"name": "math_with_judge_simple_agent"}, "uuid": "u1"}, "answer", "u1"),
        ("nemo-gym", {**GYM, "agent_ref": {"name": "simpleqa_hermes_agent"}, "uuid": "u1"}, "answer", "u1"),
        ("nemo-gym", {**GYM, "options": [{"A": "1"}], "grading_mode": "lenient_boxed", "uuid": "u"}, "answer", "u"),
        ("nemo-gym", {"responses_create_params": {}, "verifier_metadata": {"unit_tests": {}}}, "programs", None),
        ("nemo-gym", {"responses_create_params": {"metadata": {"instance_dict": "{}"}}}, "swe-bench", None),
        ("nemo-gym", {"FAIL_TO_PASS": [], "base_commit": "c", **SWE_ROW}, "swe-bench", "a__b-1"),
        ("nemo-gym", {**GYM, "server": "reasoning_gym", "metadata": {"source_dataset": "x"}}, "math", None),
        ("swe-bench", SWE_ROW, "swe-bench", "a__b-1"),
        ("answer", {"problem": "1+1", "answer": "2", "id": 5}, "answer", "5"),
        ("programs", {"question_id": "q", "question_content": "x"}, "programs", "q"),
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f(): ..."}, "code", "HumanEval/0"),
    ],
)
def test_format_decides_the_handler(
    tmp_path: Path, form: str, row: dict[str, Any], data_source: str, instance_id: str | None
) -> None:
    rows = read_rows(written(tmp_path, [row]), form)
    (instance,) = rows.instances
    # an instance without a name is named by its contents
    name = instance.digest[:16] if instance_id is None else instance_id
    assert (instance.data_source, instance.instance_id) == (data_source, name)
    assert rows.numbers == [1]


def test_rows_of_swe_and_skyrl_are_unwrapped(tmp_path: Path) -> None:
    swe = {**MATH, "data_source": "swe_gym", "extra_info": {"instance": json.dumps(SWE_ROW)}}
    assert read_rows(written(tmp_path, [swe]), "verl").instances[0].fields == SWE_ROW
    swe = {"prompt": [], "env_class": "null", "instance": json.dumps(SWE_ROW)}
    assert read_rows(written(tmp_path, [swe]), "skyrl").instances[0].fields == SWE_ROW
    prompt = [{"role": "user", "content": "x"}]
    row = {"prompt": prompt, "env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "y"}, "extra": 1}
    fields = read_rows(written(tmp_path, [row]), "skyrl").instances[0].fields
    assert fields["environment"] == "skyrl_gym"
    assert (fields["id"], fields["messages"]) == ("gsm8k_multi_turn", prompt)
    # in the form that the environment's adapter expects
    assert fields["kwargs"] == {"reward_spec": {"ground_truth": "y"}, "extra": 1}


def test_default_columns_fill_only_rows_without_them(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2", "reward_spec": {"ground_truth": "4"}}, {"prompt": "x", "env_class": "gsm8k_multi_turn"}]
    found = read_rows(written(tmp_path, rows), "skyrl", given={"env_class": "gsm8k"}).instances
    assert [each.data_source for each in found] == ["answer", "environment"]
    assert found[0].fields["env_class"] == "gsm8k"
    assert for_rows("skyrl", ["env_class=gsm8k", "model=m"]) == ({"env_class": "gsm8k"}, ("model=m",))
    assert for_rows("verl", ["env_class=gsm8k"]) == ({}, ("env_class=gsm8k",))
    assert for_rows("answer", ["rm_type=f1"]) == ({"rm_type": "f1"}, ())
    with pytest.raises(InvalidRequest, match="skyrl accepts env_class for all rows"):
        read_rows(written(tmp_path, rows), "skyrl", given={"server": "mcqa"})


def test_judge_servers_select_a_judge(tmp_path: Path) -> None:
    row = {**GYM, "agent_ref": {"name": "physics_judge_simple_agent"}}
    (instance,) = read_rows(written(tmp_path, [row]), "nemo-gym").instances
    assert instance.fields["judge"] == {}
    text = {**GYM, "server": "string_match", "extraction_mode": "last_line", "case_sensitive": True}
    (instance,) = read_rows(written(tmp_path, [text]), "nemo-gym").instances
    assert instance.fields["rule"] == "string_match_last_line_exact"
    choice = {**GYM, "server": "mcqa", "options": [{"A": "1"}, {"B": "2"}]}
    assert read_rows(written(tmp_path, [choice]), "nemo-gym").instances[0].fields["grading_mode"].startswith("strict")


def test_invalid_rows_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    no_gold = {"data_source": "x", "prompt": []}
    path = written(tmp_path, [MATH, no_gold, "{broken", "", [1], MATH])
    with pytest.raises(InvalidRequest) as refused:
        read_rows(path, "verl")
    places = [place for place, _ in refused.value.complaints]
    assert places == [f"{path}:2", f"{path}:3", f"{path}:5"]
    assert "reward_model" in str(refused.value)
    with pytest.raises(InvalidRequest) as many:
        read_rows(written(tmp_path, [no_gold] * 50), "verl")
    assert len(many.value.complaints) == 20


@pytest.mark.parametrize(
    ("rows", "form", "reason"),
    [
        ([], "verl", "it has no rows"),
        ([MATH], "parchment", "there is no form 'parchment'; known: verl, dapo"),
        ([MATH], "columns", "name the handler for the columns"),
        ([{"responses_create_params": {}, "agent_ref": {"name": "own"}}], "nemo-gym", "its agent is 'own'"),
        ([{**GYM, "agent_ref": {"name": "graphwalks_simple_agent"}}], "nemo-gym", "'graphwalks_simple_agent'"),
        ([{**GYM, "agent_ref": {"name": "lc_mcqa_agent"}}], "nemo-gym", "its agent is 'lc_mcqa_agent'"),
        ([GYM], "nemo-gym", "--set server=math_with_judge"),
        (
            [{**GYM, "server": "simpleqa", "responses_create_params": {"tools": [{"name": "search"}]}}],
            "nemo-gym",
            "it has tools of the server 'simpleqa'",
        ),
        ([{**GYM, "server": "reasoning_gym"}], "nemo-gym", "needs its family"),
        ([{"prompt": "x"}], "skyrl", "--set env_class=gsm8k"),
        (
            [{"prompt": "x", "env_class": "multiply"}],
            "skyrl",
            "'multiply' is the trainer's own class",
        ),
        ([{"prompt": "x", "env_class": "search"}], "skyrl", "'search' needs a search engine"),
        ([{"prompt": "x", "env_class": "null"}], "skyrl", "'null' is the trainer's own class"),
        ([{"answer": 10**30}], "answer", "64 bits"),
        (['{"a": 1, "a": 2}'], "answer", "'a' occurs twice"),
    ],
)
def test_unreadable_rows_are_refused(tmp_path: Path, rows: list[Any], form: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        read_rows(written(tmp_path, rows), form)


def test_repeats_are_dropped_by_index_and_by_prompt(tmp_path: Path) -> None:
    other = prompted("What is 2+2?", extra_info={"index": "b"})
    same_prompt = {**other, "extra_info": {"index": "c"}}
    path = written(tmp_path, [MATH, other, MATH, same_prompt, MATH])
    rows = read_rows(path, "dapo")
    assert [each.instance_id for each in rows.instances] == ["own-0000", "b"]
    assert (rows.n_rows, rows.n_repeats, rows.numbers) == (5, 3, [1, 2])
    assert len(read_rows(path, "dapo", deduplicate=False).instances) == 5
    assert len(read_rows(path, "verl").instances) == 5
    BatchRequest(instances=tuple(read_rows(path, "verl").instances))


def test_two_problems_with_one_index_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [MATH, prompted("What is 2+2?")])
    with pytest.raises(InvalidRequest, match="its index 'own-0000' is that of row 1, which is another problem"):
        read_rows(path, "dapo")
    # without that rule they are two problems, identified by their contents
    rows = read_rows(path, "verl")
    assert [each.instance_id for each in rows.instances] == [each.digest[:16] for each in rows.instances]
    BatchRequest(instances=tuple(rows.instances))


def test_columns_are_mapped(tmp_path: Path) -> None:
    path = written(tmp_path, [{"problem": "1+1", "meta": {"gold": "2"}, "difficulty": 3}])
    mapping = {"question": "problem", "gold": "meta.gold"}
    rows = read_rows(path, "columns", columns=mapping, data_source="answer")
    assert rows.instances[0].fields == {"question": "1+1", "gold": "2"}
    kept = read_rows(path, "answer", columns={"question": "problem"}).instances[0].fields
    assert kept == {"question": "1+1", "meta": {"gold": "2"}, "difficulty": 3}
    with pytest.raises(InvalidRequest, match=r"rows\.jsonl:1: it has no column 'prompt', only problem, meta"):
        read_rows(path, "columns", columns={"question": "prompt"}, data_source="answer")


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz", "rows.parquet"])
def test_files_of_other_formats_hold_the_same_rows(tmp_path: Path, name: str) -> None:
    expected = read_rows(written(tmp_path, [MATH, prompted("x", extra_info={"index": "b"})]), "verl")
    rows = [each.fields for each in expected.instances]
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        write_parquet(path, rows)
    found = read_rows(path, "verl")
    assert found.instances == expected.instances
    assert found.numbers == [1, 2]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_parquet_values_without_a_json_type_are_converted(tmp_path: Path) -> None:
    import datetime
    import decimal

    path = tmp_path / "rows.parquet"
    row = {"problem": "x", "answer": decimal.Decimal("2.50"), "at": datetime.date(2026, 1, 2), "none": None}
    write_parquet(path, [{**row, "extra": {"a": 1, "b": None}}, {**row, "extra": {"a": None, "b": "y"}, "none": "z"}])
    first, second = (each.fields for each in read_rows(path, "answer").instances)
    assert first == {"problem": "x", "answer": 2.5, "at": "2026-01-02", "extra": {"a": 1}}
    assert (second["extra"], second["none"]) == ({"b": "y"}, "z")
    write_parquet(path, [{"problem": "x", "answer": 1.0}, {"problem": "y", "answer": float("nan")}])
    with pytest.raises(InvalidRequest, match=r"rows\.parquet:2"):
        read_rows(path, "answer")
    write_parquet(path, [{"problem": b"x"}])
    with pytest.raises(InvalidRequest, match=r"rows\.parquet:1"):
        read_rows(path, "answer")
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(InvalidRequest, match="cannot be read as parquet"):
        read_rows(path, "answer")


@pytest.mark.parametrize("file", sorted(ROWS.glob("*_form.jsonl")), ids=lambda file: file.stem)
def test_sample_rows_of_swe_are_read(file: Path) -> None:
    form = "nemo-gym" if "nemo" in file.name else "swe-bench"
    rows = read_rows(file, form)
    assert [each.data_source for each in rows.instances] == ["swe-bench"] * 2
    assert len(BatchRequest(instances=tuple(rows.instances)).instances) == 2

"""Errors about files of rows: the file, the row, the column or the character, and the remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm.errors import InvalidRequest
from farm.rows import read_rows

GOOD = json.dumps({"problem": "one", "answer": "1"})
VERL = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}, "data_source": "x"}
FILES: dict[str, tuple[str, bytes, str, str]] = {
    "a cut line": ("f.jsonl", f'{GOOD}\n{{"a": 1'.encode(), "answer", r"f.jsonl:2: not JSON: .* character 8; expected"),
    "Python's quotes": ("f.jsonl", b"{'a': 1}", "answer", r"f.jsonl:1: not JSON: .*double quotes at character 2"),
    "a cut array": ("f.json", b'[{"a": 1},\n {"a": ]', "answer", r"f.json: not JSON: .* at line 2, character 8"),
    "a list in a line": (
        "f.jsonl",
        f"{GOOD}\n[1]".encode(),
        "answer",
        r"f.jsonl:2: this is not a JSON object, but a list",
    ),
    "a text in a line": ("f.jsonl", f'{GOOD}\n"x"'.encode(), "answer", r"f.jsonl:2: .*but a text; expected"),
    "null in a line": ("f.jsonl", f"{GOOD}\nnull".encode(), "answer", r"f.jsonl:2: .*but null; expected"),
    "a name twice": ("f.jsonl", b'{"a": 1, "a": 2}', "answer", r"f.jsonl:1: 'a' occurs twice .*: keep one of them"),
    "Latin-1": ("f.jsonl", f'{GOOD}\n{{"a": "'.encode() + b"\xe9", "answer", r"f.jsonl:2: .*byte 8 .*\(0xe9\).*iconv"),
    "nothing": ("f.jsonl", b"\n\n", "answer", r"f.jsonl: it has no rows; expected"),
    "CSV": ("f.csv", b"problem,answer\n1,2\n", "answer", r"f.csv: it is CSV; .*csv.DictReader"),
    "TSV": ("f.tsv", b"problem\tanswer\n", "answer", r"f.tsv: it is TSV; .*lines of JSON"),
    "a spreadsheet": ("f.xlsx", b"PK\3\4", "answer", r"f.xlsx: it is a spreadsheet; .*save it as CSV"),
    "Arrow": ("f.arrow", b"ARROW1", "answer", r"f.arrow: it is Arrow; .*to_parquet"),
    "a pickle": ("f.pkl", b"\x80\4", "answer", r"f.pkl: it is a pickle; .*no pickle is ever loaded"),
    "zip": ("f.jsonl", b"PK\3\4", "answer", r"f.jsonl: it is a packed file; .*unpack it"),
    "zstandard": ("f.jsonl", b"\x28\xb5\x2f\xfd", "answer", r"f.jsonl: it is a packed file; .*unpack it"),
    "Git LFS": ("f.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "answer", r"f.jsonl: .*`git lfs pull`"),
    "Git LFS for parquet": ("f.parquet", b"version https://git-lfs.github.com/spec/v1\n", "answer", r"git lfs pull"),
    "a page": ("f.jsonl", b"\n<!DOCTYPE html><html>", "answer", r"f.jsonl: it is a page of HTML; .*the file itself"),
    "parquet by another name": ("f.jsonl", b"PAR1\x15", "answer", r"f.jsonl: it is parquet; .*ends in .parquet"),
    "broken parquet": (
        "f.parquet",
        b"PAR1nothing",
        "answer",
        r"f.parquet: it cannot be read as parquet: .*write it again",
    ),
    "broken gzip": ("f.jsonl.gz", gzip.compress(b"x")[:-4], "answer", r"f.jsonl.gz: .*cannot be unpacked"),
    "another form": ("f.jsonl", b'{"a": 1, "b": 2}', "verl", r"f.jsonl:1: .*`reward_model`.*columns are a, b: .*--map"),
    "no column at all": ("f.jsonl", b"{}", "skyrl", r"f.jsonl:1: .*`env_class`.*columns are none: "),
}


@pytest.mark.parametrize("name", FILES)
def test_unreadable_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file, data, form, expected = FILES[name]
    path = tmp_path / file
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=expected) as caught:
        read_rows(path, form)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Value error" not in str(caught.value)


def rows(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, values)))
    return path


def test_missing_column_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    path = rows(tmp_path / "f.jsonl", {"problem": "a", "answer": 1}, {"q": "a", "answer": 1})
    with pytest.raises(InvalidRequest, match=r"f.jsonl:2: .* no column 'problem', only q, answer: .*question=COLUMN"):
        read_rows(path, "answer", columns={"question": "problem"})


def test_one_index_for_two_problems(tmp_path: Path) -> None:
    first, second = ({**VERL, "prompt": [{"role": "user", "content": text}]} for text in "ab")
    path = rows(tmp_path / "f.jsonl", first | {"extra_info": {"index": 1}}, second | {"extra_info": {"index": 1}})
    with pytest.raises(InvalidRequest, match=r"f.jsonl:2: .* row 1, .*: give each its own, or .*--no-deduplicate"):
        read_rows(path, "verl", deduplicate=True)


def test_parquet_value_without_a_json_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": [None, b"\xff"]}), path)
    with pytest.raises(InvalidRequest, match=r"f.parquet:2: fields: answer is a bytes, .*: give a text, a number"):
        read_rows(path, "answer")


def test_several_invalid_rows_are_listed_together(tmp_path: Path) -> None:
    path = rows(tmp_path / "f.jsonl", *({"a": number} for number in range(50)))
    with pytest.raises(InvalidRequest) as caught:
        read_rows(path, "verl")
    assert [place for place, _ in caught.value.complaints] == [f"{path}:{number}" for number in range(1, 21)]

"""Files that a batch is read from: parsed, or refused in one clear line with the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from farm.cli.request_files import read_problems, read_request, read_rows_as, set_fields
from farm.errors import FarmError, InvalidRequest
from farm.records.request import BatchRequest, Instance

ONE = b'{"data_source": "noop", "fields": {}}'
READ: dict[str, tuple[bytes, list[int]]] = {
    "lines": (ONE + b"\n" + ONE + b"\n", [1, 2]),
    "no newline at the end": (ONE, [1]),
    "blank lines between": (b"\n\n" + ONE + b"\n  \n" + ONE, [3, 5]),
    "CRLF": (ONE + b"\r\n" + ONE + b"\r\n", [1, 2]),
    "the mark that editors put before UTF-8": (b"\xef\xbb\xbf" + ONE, [1]),
    "packed by gzip": (gzip.compress(ONE + b"\n" + ONE), [1, 2]),
    "a huge line": (ONE.replace(b"{}", b'{"text": "' + b"x" * 5_000_000 + b'"}'), [1]),
    "a line separator of Unicode within a text": (ONE.replace(b"{}", '{"a": "b\u2028c"}'.encode()), [1]),
}
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "f: it is empty"),
    "blank lines": (b"\n \r\n", "f: it is empty"),
    "an empty gzip file": (gzip.compress(b""), "f: it is empty"),
    "a JSON array": (b"[" + ONE + b"]", "f:1: this is a JSON array; expected: one JSON object per line"),
    "a JSON array over many lines": (b"[\n" + ONE + b"\n]", "f:1: not JSON: .*one JSON object per line"),
    "an object over many lines": (b'{\n"data_source": "noop"\n}', "f:1: not JSON: .*one JSON object per line"),
    "nonsense": (ONE + b"\nnonsense", "f:2: not JSON"),
    "two objects in a line": (ONE + b" " + ONE, "f:1: not JSON: Extra data"),
    "a number": (ONE + b"\n3", "f:2: this is not a JSON object"),
    "null": (b"null", "f:1: this is not a JSON object"),
    "a quoted line": (json.dumps(ONE.decode()).encode(), "f:1: this is not a JSON object"),
    "UTF-16": (ONE.decode().encode("utf-16"), "f: it is not UTF-8, but UTF-16"),
    "UTF-16 without a mark": (ONE.decode().encode("utf-16-le"), "f: it is not UTF-8, but UTF-16"),
    "Latin-1": (ONE + b'\n{"a": "\xe9"}', "f:2: it is not UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0", "f: it is not UTF-8"),
    "half a gzip file": (gzip.compress(ONE * 100)[:30], "f: it has a gzip header but cannot be unpacked"),
    "a name twice": (b'{"data_source": "a", "fields": {"x": 1, "x": 2}}', "f:1: 'x' occurs twice in one object"),
    "deep nesting": (b"[" * 100_000, "f:1: it is nested too deep"),
    "YAML": (b"- data_source: noop\n", "f:1: not JSON"),
    "CSV": (b"data_source,fields\nnoop,{}\n", "f:1: not JSON"),
}


def matching(expected: str, tmp_path: Path) -> str:
    return f"^{expected.replace('f:', f'{tmp_path}/f:', 1)}"


@pytest.mark.parametrize(("data", "lines"), READ.values(), ids=READ)
def test_valid_files_are_read(tmp_path: Path, data: bytes, lines: list[int]) -> None:
    (tmp_path / "f").write_bytes(data)
    problems = read_problems(tmp_path / "f")
    assert problems.lines == lines
    assert all(instance["data_source"] == "noop" for instance in problems.instances)
    assert problems.placed("instances[0].fields is wrong") == f"{tmp_path}/f:{lines[0]}.fields is wrong"
    assert problems.placed(f"instances[{len(lines)}]") == f"instances[{len(lines)}]"


@pytest.mark.parametrize(("data", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_file_is_one_line_with_its_place(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(InvalidRequest, match=matching(expected, tmp_path)) as refused:
        read_problems(tmp_path / "f")
    assert "\n" not in str(refused.value)


REQUEST = {"n_samples": 8, "sampling": {"top_p": 0.9}, "instances": [{"data_source": "noop", "fields": {}}]}
YAML = """
n_samples: 8
sampling: {top_p: 0.9}
instances:
- data_source: noop
  fields: {}
"""


@pytest.mark.parametrize(
    ("name", "text"), [("r.yaml", YAML), ("r.json", json.dumps(REQUEST)), ("r", json.dumps(REQUEST))]
)
def test_request_is_read_from_yaml_and_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    read = read_request(tmp_path / name)
    assert read == REQUEST
    assert BatchRequest.model_validate(read).sampling.top_p == 0.9


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("r.yaml", "- 1\n", "r.yaml: expected the fields"),
        ("r.yaml", "", "r.yaml: expected the fields"),
        ("r.yaml", "n_samples: 8\nmodel: a\nn_samples: 9\n", "r.yaml:3: 'n_samples' occurs twice"),
        ("r.yaml", "sampling:\n  top_p: 1\n  top_p: 1\n", "r.yaml:3: 'top_p' occurs twice"),
        ("r.yaml", "n_samples: [8\n", "r.yaml:2: not YAML"),
        ("r.yaml", "a: !!python/object/apply:os.system ['true']\n", "r.yaml:1: not YAML"),
        ("r.yaml", "1: 2\n", "r.yaml:1: the name 1 is not text"),
        ("r.yaml", "\tn_samples: 8\n", "r.yaml:1: not YAML"),
        ("r.json", "n_samples: 8\n", "r.json: not JSON"),
        ("r.json", '{"n_samples": 8, "n_samples": 9}', "r.json: 'n_samples' occurs twice"),
        ("r.json", "[1]", "r.json: expected the fields"),
    ],
)
def test_invalid_request_is_one_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=f"^{tmp_path}/{expected}") as refused:
        read_request(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["n_samples=8"], {"n_samples": 8}),
        (["sampling.top_p=0.9", "sampling.seed=1"], {"sampling": {"top_p": 0.9, "seed": 1}}),
        (["model=Qwen/Qwen3-8B"], {"model": "Qwen/Qwen3-8B"}),
        (["model=a=b"], {"model": "a=b"}),
        (['metadata={"run": 7}', "metadata.step=3"], {"metadata": {"run": 7, "step": 3}}),
        (["max_staleness=null"], {"max_staleness": None}),
        (['sampling.stop=["x"]'], {"sampling": {"stop": ["x"]}}),
        (["model="], {"model": ""}),
    ],
)
def test_single_fields_are_set(settings: list[str], expected: dict[str, Any]) -> None:
    request: dict[str, Any] = {}
    set_fields(request, tuple(settings))
    assert request == expected


@pytest.mark.parametrize("setting", ["top_p", "=3", "a..b=1", ".a=1", "", "model.name=x", "instances=[]"])
def test_invalid_set_option_is_refused(setting: str) -> None:
    with pytest.raises(FarmError, match=r"^--set: "):
        set_fields({"model": "m"}, (setting,))


def test_rows_of_a_data_set_keep_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"problem": "a", "answer": "1"}\n\n{"problem": "b", "answer": "2"}\n{"problem": "b", "answer": "2"}\n'
    )
    rows, counted = read_rows_as(file, "columns", ["question=problem", "gold=answer"], "answer", True)
    assert counted == "3 rows, 1 repeats left out"
    fields = {"question": "b", "gold": "2"}
    name = Instance(data_source="answer", fields=fields).digest[:16]
    assert rows.instances[1] == {"data_source": "answer", "fields": fields, "instance_id": name}
    assert rows.placed("instances[1].fields.gold: too short") == f"{file}:3.fields.gold: too short"


@pytest.mark.parametrize("text", ["question", "=problem", "question="])
def test_invalid_mapping_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is not NAME=COLUMN"):
        read_rows_as(tmp_path / "rows.jsonl", "answer", [text], "", None)

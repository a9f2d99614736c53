"""Generated calls as vLLM, SGLang and renderers parse them, recorded by `tests/oracles`, compared with the farm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.oracles.cases.tool_call_cases import RECORDS, WRITERS, Case, agrees, faults

RECORDED = [json.loads(line) for line in RECORDS.read_text().splitlines()]


def case_of(record: dict[str, Any]) -> Case:
    calls = tuple((name, arguments) for name, arguments in record["calls"])
    return Case(record["format"], record["kind"], record["text"], calls)


@pytest.mark.parametrize("name", WRITERS)
def test_recorded_cases_have_no_faults(name: str) -> None:
    records = [record for record in RECORDED if record["format"] == name]
    assert len(records) >= 8
    for record in records:
        assert faults(case_of(record), record["read"]) == []


@pytest.mark.parametrize("name", WRITERS)
def test_reference_package_parses_what_was_written(name: str) -> None:
    """The texts are calls in this format to another parser, too, not only to the farm's."""
    whole = [record for record in RECORDED if record["format"] == name and record["kind"] == "whole"]
    for record in whole:
        case = case_of(record)
        read = [each for each in record["read"].values() if not isinstance(each, str)]
        assert any(len(each) == len(case.calls) for each in read)
    assert any(any(agrees(each, record["calls"]) for each in record["read"].values()) for record in whole)

"""The program in an answer equals the result of EvalPlus' `sanitize`; `make test-oracles` tries more answers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from workers.row_forms.fenced_blocks import sanitized

RECORDED = Path(__file__).parents[3] / "data" / "oracles" / "evalplus_programs.json"
ANSWERS = json.loads(RECORDED.read_text())
_MANY = "\n".join(f"def f{number}(a):\n    x = a + {number}\n    return x\n" for number in range(100))
LONG = {
    "brackets": "(" * 100_000,
    "lines of brackets": "(\n" * 3000,
    "prose": "The answer is it's here, so.\n" * 3000,
    "strings": '"""\n' * 3001,
    "breaks at the end": f"{_MANY}\nx ==== 2\n" * 5,
    "a line": "x = 1;" * 20_000,
    "decorators": "@a\n" * 3000,
    "blocks": "if x:\n  y\n" * 1500 + "else it\n",
}


def test_programs_are_those_of_evalplus() -> None:
    assert len(ANSWERS) == 150
    assert [answer for answer, program in ANSWERS if sanitized(answer, "f") != program.strip()] == []


@pytest.mark.parametrize(
    "text", [*LONG.values(), "\0\nx = 1\n", "", "\ud800"], ids=[*LONG, "a null", "nothing", "half"]
)
def test_any_answer_is_parsed_in_a_few_seconds(text: str) -> None:
    began = time.process_time()
    sanitized(text, "f")
    assert time.process_time() - began < 5

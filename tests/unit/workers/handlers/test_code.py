from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from workers.handlers.code import CodeHandler, CodeInstance
from workers.plugins.interfaces import Submission
from workers.testing import FakeSandbox

FIELDS: dict[str, Any] = {
    "task_id": "t/1",
    "prompt": "def f(x):\n    'Twice x.'\n",
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(2) == 4  # HIDDEN\n",
    "canonical_solution": "    return 2 * x  # SECRET\n",
}
INSTANCE = CodeInstance.model_validate(FIELDS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"entry_point": "g"}, "does not define the entry point 'g'"),
        ({"entry_point": "f; import os"}, "entry_point"),
        ({"test": "assert f(2) == 4"}, r"does not define check\(candidate\)"),
        ({"solution": "x"}, "solution"),
    ],
)
def test_invalid_fields_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CodeInstance.model_validate(FIELDS | change)


def test_policy_sees_neither_tests_nor_solution() -> None:
    text = str(CodeHandler(INSTANCE).messages())
    assert "Twice x." in text
    assert "/workspace/solution.py" in text
    assert "SECRET" not in text
    assert "HIDDEN" not in text


@pytest.mark.parametrize(
    ("left", "files"),
    [
        (b"def f(x): ...\n", {"solution.py": "def f(x): ...\n"}),
        (b"\xff\0", {"solution.py": "\ufffd\ufffd"}),
        (None, {}),
        (b"#" * 1_000_001, {}),
    ],
)
def test_file_is_collected(left: bytes | None, files: dict[str, str]) -> None:
    sandbox = FakeSandbox()
    if left is not None:
        sandbox.files["/workspace/solution.py"] = left
    collected = asyncio.run(CodeHandler(INSTANCE).collect(sandbox, "done"))
    assert collected == Submission(answer="done", files=files)

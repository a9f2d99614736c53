"""The map of the code is correct: its files exist, and define the functions and classes named after them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MAP = ROOT / "docs" / "concepts" / "map.md"
ROW = re.compile(r"^\| (?!question|---)(.+?) \| (.+) \|$", re.MULTILINE)
PATH = re.compile(r"`((?:farm|workers|tests|testkit|examples|alembic|docker|benchmarks)/[\w./-]*)`")
NAMES = re.compile(PATH.pattern + r"((?:, `[\w.]+`)+)")
NAME_IN = re.compile(r"`([A-Za-z_][\w.]*)` in\s+" + PATH.pattern)


@cache
def defined(path: Path) -> frozenset[str]:
    """Return the names that a module defines: its own, and those of its classes as `Class.name`."""
    return frozenset(_names(ast.parse(path.read_text()), ""))


def _names(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in parent.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node, f"{prefix}{node.name}.")
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def missing(text: str) -> list[str]:
    """Return the names given as "`path`, `name`" or "`name` in `path`" that the file does not define."""
    named = [(path, name) for path, names in NAMES.findall(text) for name in re.findall(r"`([\w.]+)`", names)]
    named += [(path, name) for name, path in NAME_IN.findall(text)]
    return [f"{path}: {name}" for path, name in named if not path.endswith(".py") or name not in defined(ROOT / path)]


def test_every_question_has_an_answer() -> None:
    rows = ROW.findall(MAP.read_text())
    assert len(rows) > 20
    for question, answer in rows:
        assert PATH.search(answer), question
        for path in PATH.findall(answer):
            assert (ROOT / path).exists(), f"{question}: {path} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_functions_and_classes_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_most_answers_name_a_function_or_class() -> None:
    assert len(NAMES.findall(MAP.read_text())) > 40


def test_missing_names_are_found() -> None:
    text = (
        "`farm/retry_policy.py`, `retry_decision_for`, `RetryDecision.outcome`, `no_such_name`; "
        "`Budget` and `Purse` in `farm/retry_policy.py`"
    )
    assert missing(text) == ["farm/retry_policy.py: no_such_name", "farm/retry_policy.py: Purse"]


def test_functions_and_classes_that_code_names_exist() -> None:
    """Docstrings and comments use "`name` in `path`", too."""
    sources = [path for folder in ("farm", "workers") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}: {each}" for path in sources for each in missing(path.read_text())] == []

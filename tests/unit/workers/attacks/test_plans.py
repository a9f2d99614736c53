"""Attacks on a task, and the solution in its row, by data source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from workers.attacks.plans import plan_of

CASES = {"solution": ["c", "p"], "language": [2, 3]}
TESTS = [SimpleNamespace(stdin="1\n", expected="2\n")]


@pytest.mark.parametrize(
    ("row", "solution"),
    [
        ({}, None),
        ({"code": "m"}, "m"),
        ({"reference": "r"}, "r"),
        ({"solutions": json.dumps(["a", "b"])}, "a"),
        ({"solutions": "not JSON"}, None),
        ({"solutions": CASES}, "p"),
        ({"solutions": {"solution": ["c"], "language": [2]}}, None),
    ],
)
def test_solution_is_found_in_a_row_of_programs(row: Mapping[str, Any], solution: str | None) -> None:
    plan = plan_of("programs", row, SimpleNamespace(function="", question="q", tests=TESTS))
    found = None if plan.solution is None else plan.solution.files["/workspace/solution.py"]
    assert found == solution


def test_no_attack_on_an_answer_equals_the_gold_answer() -> None:
    instance = SimpleNamespace(question="84", gold="84", options=(), pattern="")
    plan = plan_of("answer", {}, instance)
    assert plan.solution is not None
    assert plan.solution.answer not in [each.answer for each in plan.attacks]


def test_names_of_attacks_are_unique() -> None:
    patch = "diff --git a/p/m.py b/p/m.py\n--- a/p/m.py\n+++ b/p/m.py\n@@ -1 +1 @@\n-a\n+b\n"
    sources = {
        "programs": SimpleNamespace(function="", question="1\n2", tests=TESTS),
        "code": SimpleNamespace(prompt="def g():\n", canonical_solution=" return 1", entry_point="g"),
        "answer": SimpleNamespace(question="q", gold="7", options=(), pattern=""),
        "swe": SimpleNamespace(patch=patch),
    }
    for source, instance in sources.items():
        names = [each.name for each in plan_of(source, {}, instance).attacks]
        assert len(names) == len({*names}) > 10, source


def test_unknown_data_source_has_only_the_untouched_attack() -> None:
    plan = plan_of("of_a_plugin", {}, None)
    assert (plan.attacks, plan.solution) == ((), None)


def test_reverse_of_a_bug_patch_is_the_solution() -> None:
    smith = plan_of("swe-bench", {}, SimpleNamespace(tree="/t", patch="+++ b/a.py\n", data_set="swe-smith"))
    assert smith.solution is not None
    assert "git apply --whitespace=nowarn -R" in smith.solution.command

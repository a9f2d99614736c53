"""The attacks for a task, by its data source: made of the instance, and of its row for the solution that it brings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from workers.attacks.answer_attacks import answer_attacks
from workers.attacks.attack import Attack, AttackPlan
from workers.attacks.function_attacks import function_attacks
from workers.attacks.issue_attacks import applied, issue_attacks
from workers.attacks.stream_attacks import stream_attacks

SOLUTION = "solution"
_PROGRAM = "/workspace/solution.py"
_SOLUTIONS = ("solution", "code", "canonical_solution", "reference", "solutions")
_PYTHON_3 = 3
"""The number of Python 3 among the languages of CodeContests."""


def plan_of(data_source: str, fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    """Return the attacks for an instance, whose row is `fields`; none for a data source that none are known for."""
    return _PLANS[data_source](fields, instance) if data_source in _PLANS else AttackPlan()


def _programs(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    if instance.function:
        attacks = function_attacks(_PROGRAM, instance.function)
    else:
        cases = [(test.stdin, test.expected) for test in instance.tests]
        attacks = stream_attacks(_PROGRAM, instance.question, cases)
    return AttackPlan(attacks, _program(_solution_of(fields)))


def _code(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    body = instance.canonical_solution
    solution = _program(f"{instance.prompt}{body}" if body else "")
    return AttackPlan(function_attacks(_PROGRAM, instance.entry_point), solution)


def _answer(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    boxed = not instance.pattern
    gold = f"\\boxed{{{instance.gold}}}" if boxed else instance.gold
    attacks = answer_attacks(instance.question, instance.gold, instance.options, boxed)
    return AttackPlan(attacks, Attack(SOLUTION, SOLUTION, answer=gold))


def _math(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    attacks = answer_attacks(instance.question, instance.answer or "", (), boxed=False)
    solution = None if instance.answer is None else Attack(SOLUTION, SOLUTION, answer=instance.answer)
    return AttackPlan(attacks, solution)


def _swe(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    return _issue("/workspace", instance.patch or "", "")


def _swe_bench(fields: Mapping[str, Any], instance: Any) -> AttackPlan:
    # the patch of SWE-smith makes the bug, so its reverse is the solution
    reverse = "-R" if instance.data_set == "swe-smith" else ""
    return _issue(instance.tree, instance.patch, reverse)


def _issue(tree: str, patch: str, options: str) -> AttackPlan:
    solution = Attack(SOLUTION, SOLUTION, command=applied(tree, patch, options)) if patch.strip() else None
    return AttackPlan(issue_attacks(tree, patch), solution)


def _program(source: str) -> Attack | None:
    return Attack(SOLUTION, SOLUTION, files={_PROGRAM: source}) if source.strip() else None


def _solution_of(row: Mapping[str, Any]) -> str:
    """Return the first program that a row has as its solution; empty if none."""
    for name in _SOLUTIONS:
        value = row.get(name)
        if isinstance(value, str) and name == "solutions" and value.strip():
            try:
                value = json.loads(value)
            except ValueError:
                continue
        if isinstance(value, Mapping):
            pairs = zip(value.get("language", ()), value.get("solution", ()), strict=False)
            value = [source for language, source in pairs if language == _PYTHON_3]
        if isinstance(value, list):
            value = next((source for source in value if isinstance(source, str)), "")
        if isinstance(value, str) and value.strip():
            return value
    return ""


_PLANS: Mapping[str, Callable[[Mapping[str, Any], Any], AttackPlan]] = {
    "programs": _programs,
    "code": _code,
    "answer": _answer,
    "math": _math,
    "swe": _swe,
    "swe-bench": _swe_bench,
}

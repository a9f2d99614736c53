"""Rows of Flower's task list: results and exceptions of any form are one readable line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from celery.events.state import State, Task

from farm.embedded.flower_tasks import LONGEST, format_task

ARGUMENTS = "(rollout=b-1.0.3, attempt=2, batch=b-1, stage=eval)"


def row(**fields: Any) -> Any:
    return format_task(Task(uuid="u", cluster_state=State(), **fields))


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("'reward 1, submitted'", "reward 1, submitted"),
        ('"the policy\'s end"', "the policy's end"),
        (r"'it\'s \"said\"'", 'it\'s "said"'),
        ("'unfinished", "'unfinished"),
        ("'", "'"),
        ("None", "None"),
        (repr("two\nlines"), "two"),
        (repr("\n\n  third\n"), "third"),
        (repr("x" * 5000), "x" * (LONGEST - 1) + "…"),
    ],
)
def test_result_is_a_line_without_quotes(result: str, shown: str) -> None:
    assert row(state="SUCCESS", result=result, args=ARGUMENTS).result == shown


@pytest.mark.parametrize(
    ("exception", "shown"),
    [
        ("StageFailed('engine_error: b-1.0.3: it broke')", "engine_error: b-1.0.3: it broke"),
        ("StageFailed('engine_error: b-1.0.3: it broke',)", "engine_error: b-1.0.3: it broke"),
        ("StageFailed('a: (b) \\'c\\'') (says the store)", "a: (b) 'c' (says the store)"),
        ("the node is gone (says the store)", "the node is gone (says the store)"),
        (repr(ValueError("one\ntwo")), "one"),
        ("WorkerLostError()", "WorkerLostError()"),
        ("Terminated(15)", "Terminated(15)"),
    ],
)
def test_exception_is_shown_as_the_result_of_a_failed_task(exception: str, shown: str) -> None:
    made = row(state="FAILURE", exception=exception, args=ARGUMENTS)
    assert made.result == shown
    assert made.exception == exception, "the task's own page shows it completely"


def test_arguments_show_only_the_attempt_and_foreign_ones_are_kept() -> None:
    assert row(args=ARGUMENTS).args == "b-1.0.3 attempt 2"
    assert row(args="(1, 2)").args == "(1, 2)"
    assert row(args=None).args is None
    assert row(args=ARGUMENTS).result is None


def test_task_that_flower_keeps_is_not_changed() -> None:
    kept = Task(uuid="u", cluster_state=State(), args=ARGUMENTS, result="'x'")
    format_task(copy.copy(kept))
    assert (kept.args, kept.result) == (ARGUMENTS, "'x'")

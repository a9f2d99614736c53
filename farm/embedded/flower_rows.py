"""Readable rows of Flower's task list: the rollout and its attempt, and one line about the end of the stage.

Celery's events hold representations of Python objects: a result in quotes, an exception as its constructor, arguments
with the batch and the stage, which the rollout and the task name already. Flower's list shows no exceptions at all.
"""

from __future__ import annotations

import re
from typing import Any

from farm.scheduler.broker import named_stage

LONGEST = 200
"""Characters of a result; the page of the task has the exception in full."""
_EXCEPTION = re.compile(r"\w+\((?P<text>(['\"]).*\2),?\)(?P<note>.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(n|r|t|['\"\\])")


def format_task(task: Any) -> Any:
    """Change a task's arguments and result to the text of its row, and return it. Flower passes a copy."""
    stage = named_stage(task.args)
    if stage is not None:
        task.args = f"{stage.rollout_id} attempt {stage.attempt}"
    if task.exception:
        found = _EXCEPTION.fullmatch(task.exception)
        task.result = _line(_unquoted(found["text"]) + found["note"] if found else task.exception)
    elif task.result:
        task.result = _line(_unquoted(task.result))
    return task


def _unquoted(text: str) -> str:
    """Return the text of a string literal; other texts unchanged."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return text
    return _ESCAPED.sub(lambda found: {"n": "\n", "r": "\n", "t": " "}.get(found[1], found[1]), text[1:-1])


def _line(text: str) -> str:
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return first if len(first) <= LONGEST else f"{first[: LONGEST - 1]}…"

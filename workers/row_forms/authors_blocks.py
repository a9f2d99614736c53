"""Extracts the program of an answer exactly like the authors of a form, right or wrong, for their score."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping

from workers.row_forms.evalplus_program import sanitized

_SKYRL = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)


def between_last_marks(answer: str, function: str) -> str:
    """LiveCodeBench: the text between the last two lines with three back-quotes; empty without two."""
    lines = answer.split("\n")
    marked = [place for place, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[marked[-2] + 1 : marked[-1]]) if len(marked) >= 2 else ""


def after_last_python_mark(answer: str, function: str) -> str:
    """verl's prime_code: the text after the last "```python", up to the next mark; else the whole answer.

    Indented text is run, too.
    """
    return textwrap.dedent(answer.rpartition("```python")[2].partition("```")[0])


def last_match(answer: str, function: str) -> str:
    """SkyRL: the last text between a mark at the end of a line and another mark, stripped; empty without one."""
    found = _SKYRL.findall(answer)
    return str(found[-1]).strip() if found else ""


def definitions_needed(answer: str, function: str) -> str:
    """EvalPlus: the imports and definitions that the function needs; empty if nothing defines it."""
    program = sanitized(answer, function)
    return program if function in program else ""


AUTHORS_PROGRAM: Mapping[str, Callable[[str, str], str]] = {
    "livecodebench": between_last_marks,
    "nemo_gym": between_last_marks,
    "skyrl_lcb": last_match,
    "prime_code": after_last_python_mark,
    "evalplus": definitions_needed,
}
"""By rule name: functions of an answer and the called function's name. Other scorers get only programs."""

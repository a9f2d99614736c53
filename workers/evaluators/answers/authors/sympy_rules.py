"""Rules whose scorers apply sympy to a policy's text; each is a verifier of the grader, named like the rule.

slime's rules `math` and `deepscaler`: the last box, equal to the gold answer as text or by sympy's `simplify`.
`deepscaler` reads only the text after `</think>` or `###Response`, and nothing if neither occurs. sympy reads both
normalized answers. Each verifier runs in its own fork.

verl's `prime_math.compute_score`: an answer extracted from the response, equal by PRM800K's or ToRA's grader. ToRA's
accepts numbers within 1e-4, a hundredth and a hundredfold, `\\pi` as 3.14, and tuples and matrices by element. The
version in verl 0.9.1 never compares expressions, as its time limit fails: answers that need that are wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from workers.evaluators.answers.authors import prm800k
from workers.evaluators.answers.reference import MAX_CHARS, box_of_last_mark, closing_brace

PRIME_MATH = "prime_math"
_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_LAST_BEFORE = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_BOXES = ("\\boxed", "\\fbox")
_UNITS = (*prm800k.UNITS, "liter")
_TOLERANCE = 1e-4
_PIS = (math.pi, 3.14)
_MAX_CHARS_OF_ANSWER = 1000
_DOLLARS = re.compile(r"\$\d+(\.\d+)?")
_PERCENTAGE = re.compile(r"^\d+(\.\d+)?\\?%$")
_BRACKETS = "[]()"
_INTERVALS = {"": "[]", ".Ropen": "[)", ".Lopen": "(]", ".open": "()"}
_INTERVAL = re.compile(r"^Interval(|\.Ropen|\.Lopen|\.open)\((.*)\)$")
_MATRIX = "\\begin{pmatrix}"
_ROW_OF_SYMPY = re.compile(r"\[([^\[\]]*)\]")
_ARITHMETIC = re.compile(r"(?:[0-9.]+[eE]|[0-9.+\-*/%()\[\]{},\s])*")
_NO_ARITHMETIC = re.compile(r"[0-9.)\]}]\s*[(\[{]|(?:^|[(\[{,])\s*\*")
"""Calls, subscripts and starred values, which Python also reads among numbers."""
_Value = Any
"""An answer as text, or evaluated: a number, or a sequence or a set of numbers."""
NAMES_OF_SLIME = ("slime_math", "slime_deepscaler")
"""Names of the rules and of the grader's verifiers; slime's `boxed_` variants score each response 0."""


def prime_math_answer(response: str) -> str:
    """Return the answer that verl extracts from a response, possibly the whole response."""
    text = response[-MAX_CHARS:]
    for mark in _BEFORE:
        text = _after(text, mark)
    for mark in _AFTER:
        if (at := text.lower().rfind(mark)) >= 0:
            text = text[:at].strip()
    text = _in_box(text) or text
    if (at := text.lower().rfind(". ")) >= 0:
        text = text[:at].strip()
    for mark in _LAST_BEFORE:
        text = _after(text, mark)
    return text


def _after(text: str, mark: str) -> str:
    at = text.lower().rfind(mark)
    return text if at < 0 else text[at + len(mark) :].strip()


def _in_box(text: str) -> str | None:
    """Return the text between the first brace after the last mark of a box and its closing brace."""
    start = next((at for mark in _BOXES if (at := text.rfind(mark)) >= 0), -1)
    opened = text.find("{", start)
    if start < 0 or opened < 0:
        return None
    end = closing_brace(text, start)
    return None if end is None else text[opened + 1 : end].strip()


def equal_by_prime_math(answer: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if an extracted answer has the value of `entry["gold"]`, else 0.0."""
    gold = entry["gold"]
    # The order of the two does not change the result, so sympy comes last.
    return float(_equal_by_parts(answer, gold) or prm800k.equal(answer, gold, normalized))


def normalized(answer: str) -> str:
    """Return an answer as verl normalizes it for sympy."""
    return prm800k.normalized(answer, units=_UNITS)


def _equal_by_parts(answer: str, gold: str) -> bool:
    pis = _PIS if "\\pi" in answer or "\\pi" in gold else _PIS[:1]
    try:
        # If verl's normalization fails on one of both, nothing is equal.
        same = [_same(answer, gold, pi) for pi in pis]
    except (ValueError, OverflowError, IndexError, RecursionError):
        return False
    return any(same)


def _same(answer: _Value, gold: _Value, pi: float = math.pi) -> bool:
    """Return whether two values are equal. Raises ValueError, OverflowError or IndexError where verl's code fails."""
    answer, gold = _plain(answer, pi), _plain(gold, pi)
    if isinstance(answer, str):
        answer = answer[:_MAX_CHARS_OF_ANSWER]
        if isinstance(gold, str) and (
            answer.strip().lower() == gold.strip().lower() or answer.replace(" ", "") == gold.replace(" ", "")
        ):
            return True
    numbers = _number(answer), _number(gold)
    if numbers[0] is not None and numbers[1] is not None:
        hundredfold = (numbers[1] / 100, numbers[1], numbers[1] * 100)
        return any(math.isclose(each, numbers[0], rel_tol=_TOLERANCE) for each in hundredfold)
    if not answer and answer != 0:
        return False
    text, gold_text = _without_names(str(answer).strip()), str(gold).strip()
    if _without_brackets(text, gold_text):
        return True
    if _is_bracketed_alike(text, gold_text) and _same_parts(text[1:-1], gold_text[1:-1]):
        return True
    if "," in text and "," in gold_text and text.count(",") == gold_text.count(","):
        return _same_parts(text, gold_text, strip=True)
    if text.startswith("Point") and gold_text[0] == "(" and gold_text[-1] == ")":
        return _same_parts(text[text.find("(") + 1 : -1], gold_text[1:-1])
    return _MATRIX in gold_text and _same_matrix(text, gold_text)


def _plain(value: _Value, pi: float) -> _Value:
    r"""Return a value without dollar or percent sign, without its base, and with `\pi` evaluated."""
    if not isinstance(value, str):
        return value
    if _DOLLARS.match(value):
        return value[1:]
    if _PERCENTAGE.match(value):
        return value.replace("\\%", "").replace("%", "")
    if "_" in value:
        return int(float(value.split("_")[0]))
    if "\\pi" not in value:
        return value
    first, *rest = value.split("\\pi")
    parts = [first]
    for part in rest:
        parts.append(f"{'' if parts[-1][-1:].isdigit() else '1'}*{pi}{part}")
    text = "".join(parts)
    evaluated = _evaluated(text)
    return text if evaluated is None else evaluated


def _evaluated(text: str) -> _Value | None:
    """Return Python's value of numbers, arithmetic and brackets; None for any other text."""
    if not _ARITHMETIC.fullmatch(text) or _NO_ARITHMETIC.search(text):
        return None
    try:
        # Only digits, signs and brackets: it contains no name that could be called.
        return eval(text, {"__builtins__": {}})  # noqa: S307
    except Exception:
        return None


def _number(value: _Value) -> float | None:
    try:
        text = str(value)
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def _without_names(text: str) -> str:
    if match := _INTERVAL.match(text):
        brackets = _INTERVALS[match.group(1)]
        return f"{brackets[0]}{match.group(2)}{brackets[1]}"
    return text


def _without_brackets(text: str, gold: str) -> bool:
    """Return whether two texts are equal without brackets and braces, while the brackets differ."""
    square = text.startswith("[") and text.endswith("]") and not gold.startswith("(")
    round_ = text.startswith("(") and text.endswith(")") and not gold.startswith("[")
    if square or round_:
        text, gold = text.strip(_BRACKETS), gold.strip(_BRACKETS)
    removed = dict.fromkeys(map(ord, "{}()"))
    return text.translate(removed) == gold.translate(removed)


def _is_bracketed_alike(text: str, gold: str) -> bool:
    ends = text[:1] + text[-1:]
    return bool(text and gold) and ends[0] in "([" and ends[1] in ")]" and ends == gold[:1] + gold[-1:]


def _same_parts(text: str, gold: str, *, strip: bool = False) -> bool:
    parts, golds = text.split(","), gold.split(",")
    if len(parts) != len(golds):
        return False
    if strip:
        parts, golds = [part.strip() for part in parts], [part.strip() for part in golds]
    # All are compared, as verl's code fails on an element after a different one, too.
    same = [_same(part, other) for part, other in zip(parts, golds, strict=True)]
    return all(same)


def _same_matrix(text: str, gold: str) -> bool:
    if text.startswith("Matrix"):
        values, golds = _cells(text), gold.split()[1:-1:2]
    elif text.startswith("[") and text.endswith("]"):
        values = _evaluated(text)
        inner = gold.removeprefix(f"\\{_MATRIX}").removeprefix(_MATRIX)
        golds = inner.removesuffix("\\\\end{pmatrix}").removesuffix("\\end{pmatrix}").split("\\")
    else:
        return False
    if not isinstance(values, list) or len(values) != len(golds):
        return False
    # In verl's code a row of several cells has quotation marks, and equals no numbers.
    return all("&" not in other and _same(value, other) for value, other in zip(values, golds, strict=True))


def _cells(text: str) -> list[Any] | None:
    """Return the numbers in a matrix of sympy, row by row; None for any other text."""
    inner = text.removeprefix("Matrix").strip()
    if not (inner.startswith("(") and inner.endswith(")")):
        return None
    rows = _evaluated(inner)
    if not isinstance(rows, list):
        return None
    # Rows of different lengths are not a matrix.
    if len({len(row) if isinstance(row, list) else -1 for row in rows}) != 1:
        return None
    # Unlike Python, sympy keeps fractions.
    cells = ",".join(_ROW_OF_SYMPY.findall(inner)) if isinstance(rows[0], list) else inner[1:-1].strip()[1:-1]
    try:
        return [prm800k.load().parse_expr(cell) for cell in cells.split(",")]
    except Exception:
        return None


def boxed_answer(rule: str, response: str) -> str | None:
    """Return the answer that a rule extracts from a response; None if there is none."""
    text = response[-MAX_CHARS:]
    if rule.endswith("deepscaler"):
        if "</think>" in text:
            text = text.rpartition("</think>")[2]
        elif "###Response" in text:
            text = text.split("###Response")[1]
        else:
            return None
    return box_of_last_mark(text)


def equal_by_slime(answer: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if an extracted answer has the value of `entry["gold"]`, else 0.0."""
    gold = entry["gold"]
    if "\\boxed" in gold:
        gold = box_of_last_mark(gold)
    return float(gold is not None and prm800k.equal(answer, gold, normalized_by_slime))


def normalized_by_slime(answer: str) -> str:
    """Return an answer as slime normalizes it, without spaces and braces."""
    return prm800k.normalized(answer, removed=" {}")


@dataclass(frozen=True, slots=True)
class SympyRule:
    """`find` extracts the answer from a response, None if there is none; `equal` scores it, 0.0 or 1.0."""

    find: Callable[[str], str | None]
    equal: Callable[[str, dict[str, Any]], float]


SYMPY_RULES: Mapping[str, SympyRule] = {
    **{name: SympyRule(partial(boxed_answer, name), equal_by_slime) for name in NAMES_OF_SLIME},
    PRIME_MATH: SympyRule(prime_math_answer, equal_by_prime_math),
}

r"""slime's rules `math` and `deepscaler`: the last box, equal to the gold answer as text or by sympy's `simplify`.

`deepscaler` reads only the text after `</think>` or `###Response`, and nothing if neither occurs. sympy reads both
normalized answers, so these are verifiers of the grader, each run in its own fork.
"""

from __future__ import annotations

from typing import Any

from workers.evaluators.answers.authors import prm800k
from workers.evaluators.answers.authors.answer_key import MAX_CHARS
from workers.evaluators.answers.authors.boxes import box_of_last_mark

NAMES = ("slime_math", "slime_deepscaler")
"""Names of the rules and of the grader's verifiers; slime's `boxed_` variants score each response 0."""


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


def equal(answer: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if an extracted answer has the value of `entry["gold"]`, else 0.0."""
    gold = entry["gold"]
    if "\\boxed" in gold:
        gold = box_of_last_mark(gold)
    return float(gold is not None and prm800k.equal(answer, gold, normalized))


def normalized(answer: str) -> str:
    """Return an answer as slime normalizes it, without spaces and braces."""
    return prm800k.normalized(answer, removed=" {}")

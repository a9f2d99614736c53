"""Rules whose scorers apply sympy to a policy's text; each is a verifier of the grader, named like the rule.

slime's rules `math` and `deepscaler`: the last box, equal to the gold answer as text or by sympy's `simplify`.
`deepscaler` reads only the text after `</think>` or `###Response`, and nothing if neither occurs. sympy reads both
normalized answers. Each verifier runs in its own fork.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from workers.evaluators.answers.authors import prime_math, prm800k
from workers.evaluators.answers.authors.answer_key import MAX_CHARS, box_of_last_mark

NAMES_OF_SLIME = ("slime_math", "slime_deepscaler")
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
    prime_math.NAME: SympyRule(prime_math.answer_in, prime_math.equal),
}

r"""Equality of mathematical answers by math-verify: a verifier of the grader, run in its own fork.

The library's usual call takes several boxes for one set, reads LaTeX only within marks, and the last number of a text
as its answer. So it gets only the final answer, in one box, and both texts are first read as LaTeX.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

FAMILY = "math-verify"
"""Its name among the grader's verifiers."""
WHOLE_RESPONSE = "math-verify of a whole response"
"""The name of the library's usual call, used by NeMo Gym's server `math_with_judge`."""
_LAST_CHARS = 20_000
UNREADABLE = "the gold answer cannot be read as mathematics"
"""The message if the gold answer is not mathematics."""
KNOWN_PAIRS = (
    (r"\frac12", "0.5", True),
    (r"\frac12", "0.6", False),
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    (r"\{2, 3\}", "x=3, x=2", True),
    (r"[0, 1)", "[0, 1]", False),
    ("a^2+2ab+b^2", "(a+b)^2", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
    ("24", "23, perhaps 24", False),
    (r"x \le 2", "x < 2", False),
    (r"\int_0^1 x dx", r"\frac{1}{2}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
)
"""Gold answers, answers, and whether they are equal: one pair for each code path of the library."""
_SYMBOL = re.compile(
    r"\\(?:math[a-z]+|text[a-z]*|mbox|operatorname|begin|end)\s*\{[^{}]*\}|"
    r"(?P<symbol>\\(?i:gamma|delta|theta|lambda|xi|pi|sigma|upsilon|phi|psi|omega)(?![A-Za-z])|(?<!\\)[A-Za-z])|\\[A-Za-z]+"
)
_LETTERS = "qwvuzyhjkgbcfmprst"
_NO_VALUES = frozenset({"NaN", "ComplexInfinity"})
_CONSTANTS = frozenset({"e", "i", "\\pi"})
_SPACED_LETTERS = re.compile(r"(?<=[0-9A-Za-z)}])\s+(?=[A-Za-z](?![A-Za-z]))")


@cache
def load() -> None:
    """Import the library and its dependencies at the first use, which takes seconds: once in the grader."""
    if equal(r"\frac12", {"gold": "0.5"}) != 1.0:
        raise RuntimeError("math-verify does not work: it considers 1/2 and 0.5 different")


@cache
def _library() -> Any:
    import logging

    import math_verify

    # It warns about each call without its own time limit, for which it would need the main thread.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def equal(answer: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if an answer has the value of `entry["gold"]`, else 0.0.

    If no reading finds them equal, raises any error of the library while it read or compared the answer.
    """
    library = _library()
    gold_text, answer = with_cases_apart(entry["gold"], answer)
    gold = _parsed(library, gold_text, library.LatexExtractionConfig(boxed_match_priority=0))
    if not gold or not _has_value(gold[0]):
        raise ValueError(UNREADABLE)
    readings = dict.fromkeys((answer, _SPACED_LETTERS.sub(r" \\cdot ", answer)))
    configs = (library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig())
    failure: Exception | None = None
    for reading in readings:
        try:
            parsed = _parsed(library, reading, *configs)
            if parsed and _equal(library, gold, parsed):
                return float(not _far(gold[0], parsed[0]))
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return 0.0


def _has_value(gold: Any) -> bool:
    """Return whether a gold answer is comparable: `11:00` is read as a division by 0, which equals nothing."""
    atoms = gold.atoms() if hasattr(gold, "atoms") else ()
    return _NO_VALUES.isdisjoint(type(atom).__name__ for atom in atoms)


def of_whole_response(response: str, entry: dict[str, Any]) -> float:
    """Return 1.0 if the library's usual call finds `entry["gold"]` in a response; 0.0 otherwise and on errors."""
    library = _library()
    gold = entry["gold"].strip()
    for opening, closing in (("\\(", "\\)"), ("$", "$")):
        if gold.startswith(opening) and gold.endswith(closing) and len(gold) > 1:
            gold = gold[len(opening) : -len(closing)].strip()
    parsed = partial(library.parse, parsing_timeout=None)
    configs = (library.ExprExtractionConfig(), library.LatexExtractionConfig())
    try:
        golds = parsed(f"\\boxed{{{gold}}}", (library.LatexExtractionConfig(),))
        answers = parsed(response[-_LAST_CHARS:], configs)
        return float(bool(golds) and bool(library.verify(golds, answers, 6, timeout_seconds=None)))
    except Exception:
        # The authors' scorer returns 0 for it, too.
        return 0.0


def _equal(library: Any, gold: Any, parsed: Any) -> bool:
    """Return the library's verdict. Raises the errors that the library would count as "not equal"."""
    compared = partial(library.verify, gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)
    try:
        return bool(compared(raise_on_error=True))
    except Exception:
        # Another reading may be equal.
        if compared():
            return True
        raise


def with_cases_apart(gold: str, answer: str) -> tuple[str, str]:
    """Return both with capitals replaced where they also occur in lower case: the library ignores case."""
    symbols = {name for text in (gold, answer) for name in _symbols(text)}
    free = iter(letter for letter in _LETTERS if letter not in symbols and letter.upper() not in symbols)
    renamed = {
        name: letter
        for name, letter in zip(sorted(each for each in symbols if each != each.lower()), free, strict=False)
        if name.lower() in symbols and name.lower() not in _CONSTANTS
    }

    def rename(match: re.Match[str]) -> str:
        name = match.group("symbol")
        # A letter ends the name of a command.
        return f"{{{renamed[name]}}}" if name in renamed else match.group()

    return _SYMBOL.sub(rename, gold), _SYMBOL.sub(rename, answer)


def _symbols(text: str) -> list[str]:
    return [name for match in _SYMBOL.finditer(text) if (name := match.group("symbol"))]


def _far(gold: Any, answer: Any) -> bool:
    """Return whether numbers differ by 1e-4 of the gold: the library rounds to six places, tiny ones to 0."""
    if gold == answer:
        return False
    if getattr(gold, "is_number", False) and getattr(answer, "is_number", False):
        if not (gold.is_finite and answer.is_finite):
            return False
        gold, answer = gold.evalf(), answer.evalf()
        return bool(abs(gold - answer) > (1e-4 * abs(gold) or 1e-12))
    kinds = {type(each).__name__ for each in (gold, answer)}
    if kinds == {"FiniteSet"} or kinds == {"FiniteSet", "Tuple"}:
        pairs = (gold.args, answer.args), (answer.args, gold.args)
        return any(all(_far(one, other) for other in others) for ones, others in pairs for one in ones)
    if kinds in ({"Tuple"}, {"Equality"}) and len(gold.args) == len(answer.args):
        return any(map(_far, gold.args, answer.args))
    return False


def _parsed(library: Any, text: str, *configs: Any) -> Any:
    # Otherwise unparsed text stays text, and equal texts were found before.
    return library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=list(configs),
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )

"""The rules of programs compared with the scorers of their forms: the scorers' results, and the farm's differences.

The farm's copy of a scorer, which gives rows the reward `authors`, has no differences. The farm's own rule differs for
listed reasons; a difference without a reason is a fault, and so is a reason without a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import absent
from tests.oracles.cases.judge_cases import EVAL_PLUS, RULES, JudgedCase, cases_of, oracle_input, value_of
from workers.evaluators.program_tests.form_rules import FormRule, form_rule

RECORDED = Path(__file__).parents[1] / "data" / "oracles" / "program_judges.json"
PROGRAM = Path(__file__).parent / "programs" / "judge_outputs.py"
ALL_RULES = (*RULES, *EVAL_PLUS)
_NUMPY = ("prime_code", "apps", "taco")


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why cases of some kinds differ: `theirs` is the scorer's result. Without `rules`, it applies to all."""

    kinds: tuple[str, ...]
    theirs: bool
    reason: str
    rules: tuple[str, ...] = ()

    def explains(self, rule: str, case: JudgedCase, theirs: bool) -> bool:
        """Return True if it is the reason for a difference."""
        of_rule = not self.rules or rule.partition(":")[0] in self.rules
        return of_rule and case.kind in self.kinds and theirs is self.theirs


REASONS = (
    Reason(
        (
            *("an integer off by one", "an integer as a float", "an integer that is close", "an integer and a half"),
            "one of several is off",
        ),
        True,
        "integers are compared exactly",
    ),
    Reason(
        (
            *("other order", "given twice", "a word twice", "a word more", "a line more", "one less", "lines joined"),
            *("words with more space", "a small number", "fewer decimals"),
        ),
        True,
        "order and number of words, numbers and lines count, and so does the space between words",
        ("apps", "taco"),
    ),
    Reason(("other letters", "odd words"), True, "case counts, except for yes and no", ("codecontests",)),
    Reason(("the first of several",), True, "the whole list is expected, not only its first item", _NUMPY),
    Reason(("another name of infinity",), True, "infinity and nan need the expected spelling"),
    Reason(("odd numbers",), True, "infinity and nan need the expected spelling", ("codecontests",)),
    Reason(("beyond doubles",), True, "a number too large for a double is not infinite", _NUMPY),
    Reason(("marks in digits",), True, "numbers are written without underscores"),
    Reason(("characters that end lines",), True, "only a line feed ends a line", _NUMPY),
    Reason(("a text for a number",), True, "a text is not a number", ("nemo_gym",)),
    Reason(("rows of another length",), True, "the length of rows counts", ("evalplus",)),
    Reason(
        (
            *("in another notation", "noise of floats", "noise of floats deeper", "off by 1e-7", "off by 1e-5"),
            *("fewer decimals", "more decimals", "zeros at the end", "a number beside words", "odd numbers"),
            *("an integer with a point", "an integer with a sign", "an integer with zeros", "an integer that is close"),
            *("numbers with points", "numbers with more space", "marks in digits", "a small number"),
        ),
        False,
        "numbers are compared as numbers, to the number of decimals shown",
    ),
    Reason(
        ("tuples in a list", "a tuple for a list", "a list for a tuple"), False, "a tuple equals a list, as in JSON"
    ),
    Reason(("whole numbers as keys",), False, "keys are strings, as in JSON"),
    Reason(("space at the ends", "an empty line within"), False, "space at the end of a line is ignored", _NUMPY),
    Reason(
        ("characters that end lines", "words with more space"),
        False,
        "every character that Python treats as whitespace is space, and equal texts are equal",
        (*_NUMPY, "codecontests"),
    ),
    Reason(("a complex number",), False, "a number is compared by its value", ("prime_code",)),
)


@dataclass(slots=True)
class JudgeAgreement:
    """The cases of a rule: how many are right by the scorer, and differ for a reason; and the faults."""

    n_right: int = 0
    known: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    used: set[Reason] = field(default_factory=set)


def answers() -> dict[str, str]:
    """Return the scorers' results: for each rule, a 0 or 1 for each case. Skips the test if they are not installed."""
    folder = Path(os.environ["FARM_TEST_ORACLES"]) / "judges"
    if not (folder / ".venv").exists():
        absent("the scorers of programs are not installed: tests/oracles/judges_environment.sh says why")
    cases = {rule: [oracle_input(rule, case) for case in cases_of(rule)] for rule in ALL_RULES}
    command = [folder / ".venv" / "bin" / "python", PROGRAM, folder]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def recorded() -> dict[str, str]:
    """Return the recorded results, of cases that are unchanged."""
    content = json.loads(RECORDED.read_text())
    assert content["cases"] == digest(), "the cases differ from the recorded ones"
    found: dict[str, str] = content["answers"]
    return found


def record(found: dict[str, str]) -> None:
    """Record the scorers' results."""
    RECORDED.write_text(json.dumps({"cases": digest(), "answers": found}, indent=1) + "\n")


def digest() -> str:
    """Return a digest of all cases."""
    text = json.dumps([[rule, oracle_input(rule, case)] for rule in ALL_RULES for case in cases_of(rule)])
    return hashlib.sha256(text.encode()).hexdigest()


def compare(rule: str, theirs: str) -> JudgeAgreement:
    """Compare the results of a scorer with both rules of the farm."""
    result, form, cases = JudgeAgreement(), form_rule(rule, "f"), cases_of(rule)
    values = form.values()
    assert len(cases) == len(theirs)
    for case, mark in zip(cases, theirs, strict=True):
        right = mark == "1"
        result.n_right += right
        authors, farm = _results(form, values, rule, case)
        line = f"{rule}: {case.kind}: {case.given[:80]!r} for {case.expected[:80]!r}"
        if authors != right:
            result.faults.append(f"{line}: its scorer: {right}, the farm's copy of it: {authors}")
        if case.right is not None and farm != case.right:
            result.faults.append(f"{line}: the farm: {farm}")
        if farm == right:
            continue
        reason = next((each for each in REASONS if each.explains(rule, case, right)), None)
        if reason is None:
            result.faults.append(f"{line}: its scorer: {right}, the farm: {farm}")
        else:
            result.known[reason.reason] += 1
            result.used.add(reason)
    return result


def _results(form: FormRule, values: object, rule: str, case: JudgedCase) -> tuple[bool, bool]:
    if not case.is_value:
        return form.outputs(case.given, case.expected), form.farm_outputs(case.given, case.expected)
    value, expected = value_of(case.given), value_of(case.expected)
    accepted: Sequence[object] = [expected]
    if rule in _NUMPY and isinstance(expected, list) and len(expected) == 1:
        # rows of these forms are read like this
        accepted = [expected, expected[0]]
    assert callable(values)
    return values((0,), value, expected), any(form.farm_values((0,), value, each) for each in accepted)

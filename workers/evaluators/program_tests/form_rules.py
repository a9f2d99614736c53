"""The hidden tests of a program, and the authors' scoring rules of well-known forms, each with the farm's own rule.

The farm's rule accepts what is right and accepted by the authors, without their leniency that accepts wrong answers:
integers that are close, words in another order, a wrong item of the expected list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workers.evaluators.authors_score import AuthorsScore
from workers.evaluators.program_tests import authors_comparison as theirs
from workers.evaluators.program_tests.output_comparison import same_lines, same_value, same_words


@dataclass(frozen=True, slots=True)
class StreamTest:
    """A test of a whole program: its standard input, and its expected standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A test of one function: its arguments and the accepted return values, mostly one."""

    arguments: Sequence[Any]
    expected: Sequence[Any]


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """The tests of one problem, all of one kind, and their limits.

    `function` is the name of the function, in `Solution` or in the module, for CallTests. `compare` is a mode of
    `output_comparison.py`, `checker` the program of that mode. `rule`, of `form_rules.py`, is that of a row's form;
    empty for other rows. `partial`: the score is the share of passed tests.
    """

    tests: Sequence[StreamTest | CallTest]
    function: str = ""
    compare: str = "lines"
    checker: str = ""
    rule: str = ""
    partial: bool = False
    time_s: float = 6.0
    memory_mb: int = 1024


Outputs = Callable[[str, str], bool]
Values = Callable[[Sequence[Any], Any, Any], bool]
"""Compares a value, given the arguments, the value and the expected value."""


@dataclass(frozen=True, slots=True)
class FormRule:
    """Comparisons for the rows of one form: the authors' and the farm's.

    `values` starts the comparison of all tests of a program, in order. `n_partial`: if not all tests pass, the authors'
    score of a program of standard input is the share of so many first ones. `imports`: programs have names without
    importing them, listed under this name in `usual_names.py`; empty: a program of standard input is a script.
    """

    name: str
    outputs: Outputs
    values: Callable[[], Values]
    farm_outputs: Outputs
    farm_values: Values
    arguments: Callable[[Sequence[Any]], Sequence[Any]] = list
    n_partial: int = 0
    imports: str = ""

    def needs_more(self, passed: Sequence[bool], is_call: bool) -> bool:
        """Return whether the authors' score of a program depends on further tests."""
        return all(passed) or (not is_call and len(passed) < self.n_partial)

    def score(self, passed: Sequence[bool], n_tests: int, is_call: bool) -> AuthorsScore:
        """Return the authors' score of a program with these results of its first tests, by their comparison."""
        if len(passed) == n_tests and all(passed):
            return AuthorsScore(self.name, 1.0, right=True)
        n = min(self.n_partial, n_tests)
        value = sum(passed[:n]) / n if n and not is_call else 0.0
        return AuthorsScore(self.name, value, right=value == 1.0)


def form_rule(text: str, function: str = "") -> FormRule:
    """Return the rule of a name; `evalplus:DATASET:ATOL` has the data set and its tolerance. Raises ValueError."""
    name, *options = text.split(":")
    if name == "evalplus" and len(options) == 2 and options[0] in ("humaneval", "mbpp"):
        return _eval_plus(options[0], function, float(options[1]))
    if options or name not in _RULES:
        raise ValueError(f"{text!r} is not a rule of a form: use {', '.join(_RULES)} or evalplus:humaneval|mbpp:ATOL")
    return _RULES[name]


def _plain(compare: Callable[[Any, Any], bool]) -> Values:
    return lambda arguments, value, expected: compare(value, expected)


def _always(values: Values) -> Callable[[], Values]:
    return lambda: values


def _eval_plus(dataset: str, function: str, atol: float) -> FormRule:
    if not 0 <= atol < 1:
        raise ValueError(f"the tolerance {atol} must be at least 0 and less than 1")

    def farm_values(arguments: Sequence[Any], value: Any, expected: Any) -> bool:
        try:
            special = theirs.special_of_eval_plus(dataset, function, arguments, value, expected, atol)
        except Exception:
            special = False
        return special or same_value(value, expected, close=(1e-7, max(atol, 1e-6)))

    return FormRule(
        name="evalplus",
        outputs=theirs.decimals_by_line,
        values=partial(theirs.eval_plus, dataset, function, atol),
        farm_outputs=same_lines,
        farm_values=farm_values,
    )


_EXACT = _plain(same_value)
_CLOSE = _plain(partial(same_value, close=(1e-5, 1e-8)))
_EQUAL = _always(_plain(theirs.equal_value))
_WRAPPED = _always(_plain(theirs.equal_or_wrapped_value))
_loose_lines: Outputs = partial(same_lines, close=(1e-5, 1e-8), counts_empty=False)


def _of_apps(name: str, outputs: Outputs, values: Callable[[], Values] = _WRAPPED, n_partial: int = 0) -> FormRule:
    keys = theirs.arguments_with_whole_keys
    return FormRule(name, outputs, values, _loose_lines, _EXACT, keys, n_partial=n_partial, imports=name)


_RULES: Mapping[str, FormRule] = {
    rule.name: rule
    for rule in (
        FormRule("livecodebench", theirs.decimals_by_line, _EQUAL, same_lines, _EXACT, imports="livecodebench"),
        FormRule("skyrl_lcb", theirs.decimals_by_line, _EQUAL, same_lines, _EXACT, imports="skyrl_lcb"),
        FormRule(
            "nemo_gym",
            theirs.close_decimals_by_line,
            _always(_plain(theirs.equal_or_close_value)),
            partial(same_lines, close=(1e-6, 1e-6), verdicts=True),
            _CLOSE,
            imports="nemo_gym",
        ),
        _of_apps("prime_code", theirs.close_by_line, _always(_plain(theirs.written_value)), n_partial=10),
        _of_apps("apps", theirs.loose_by_line),
        _of_apps("taco", theirs.loose_as_text),
        FormRule("codecontests", theirs.near_words, _EQUAL, partial(same_words, close=(0.0, 1e-5)), _EXACT),
    )
}

"""Outputs and values that the scorers of programs judge: right and wrong, plain and odd, the same in each run.

A case is marked as right, wrong, or debatable.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SEED = 33
RULES = ("livecodebench", "skyrl_lcb", "nemo_gym", "prime_code", "apps", "taco", "codecontests")
"""Rules of outputs; all but the last are of values, too."""
EVAL_PLUS = ("evalplus:humaneval:0.0", "evalplus:mbpp:0.0", "evalplus:mbpp:0.0001")


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """One output, or one value as Python source. `expected` is a text, or a value as Python source.

    `right`: None if that is debatable.
    """

    kind: str
    given: str
    expected: str
    right: bool | None
    is_value: bool = False


TEXTS = (
    *("3", "1 2 3", "YES", "No", "a b c", "1.5", "-7", "hello world\n3 4", "0.333333333333", "1\n2\n3", "0", "-0.5"),
    *("['a', 'b']", "[1, 2]", "u\u0308ni\u2603", "True", "*\n ***\n*****", "1e-07", "1" + "0" * 25, "{1: 'x'}", "It's"),
    *("1 2\n3 4\n5 6", "Case #1: 7", "2.50 3.25", "nan", "inf", "-1", "4 -2 0", '"quoted"', "x\ty", "0.10 yes"),
)
WORDS = ("alpha", "Beta", "yes", "NO", "x", "node", "true", "None", "k9")


def output_cases() -> list[JudgedCase]:
    """Return some 1,700 outputs."""
    draw = random.Random(SEED)
    cases = [*_spaced(), *_numbers(draw), *_lists(draw), *_odd()]
    unique = {(case.given, case.expected): case for case in cases if case.given != "" or case.expected != ""}
    return list(unique.values())


def _spaced() -> Iterator[JudgedCase]:
    for text in TEXTS:
        lines = text.split("\n")
        yield JudgedCase("the same", text, text, True)
        yield JudgedCase("space at the ends", text + "\n", text, True)
        yield JudgedCase("space at the ends", text, text + "\n", True)
        yield JudgedCase("space at the ends", "\n".join(line + "  " for line in lines) + "\n\n", text, True)
        yield JudgedCase("space at the ends", "\r\n".join(lines) + "\r\n", text, True)
        yield JudgedCase("space at the ends", "\n" + text + "\t\n", text + "\n", True)
        yield JudgedCase("nothing", "\n", text, False)
        yield JudgedCase("a line more", text + "\n0\n", text, False)
        yield JudgedCase("a word more", text + " 0", text, False)
        yield JudgedCase("given twice", f"{text}\n{text}", text, False)
        if len(lines) > 1:
            yield JudgedCase("an empty line within", "\n\n".join(lines), text, None)
            yield JudgedCase("lines joined", " ".join(lines), text, None)
            yield JudgedCase("a line less", "\n".join(lines[:-1]), text, False)
            yield JudgedCase("other order", "\n".join(lines[::-1]), text, False)


def _numbers(draw: random.Random) -> Iterator[JudgedCase]:
    for _ in range(60):
        whole = draw.choice((draw.randint(-9, 9), draw.randint(-(10**6), 10**6), draw.randint(10**9, 10**30)))
        text = str(whole)
        yield JudgedCase("an integer with a point", f"{whole}.0", text, True)
        yield JudgedCase("an integer off by one", str(whole + draw.choice((-1, 1))), text, False)
        yield JudgedCase("an integer as a float", repr(float(whole + 7)), text, False)
        yield JudgedCase(
            "an integer that is close", f"{whole}.{draw.choice(('00000001', '0000000000004'))}", text, None
        )
        yield JudgedCase("an integer with a sign", f"+{text}" if whole >= 0 else text, text, True)
        yield JudgedCase("an integer with zeros", f"00{text}" if whole >= 0 else f"-00{-whole}", text, None)
        yield JudgedCase("an integer and a half", f"{whole}.5", text, False)
    for _ in range(60):
        value = draw.uniform(-100, 100) * draw.choice((1, 1, 1e-3, 1e4))
        shown = draw.choice((3, 6, 9, 12))
        text = f"{value:.{shown}f}"
        exact = float(text)
        yield JudgedCase("zeros at the end", text + "00", text, True)
        yield JudgedCase("in another notation", f"{exact:.17e}", text, True)
        yield JudgedCase("noise of floats", repr(exact * (1 + 3e-16)), text, True)
        yield JudgedCase("another decimal", f"{value + 0.01 * max(1.0, abs(value)):.{shown}f}", text, False)
        yield JudgedCase("off by a thousandth", repr(exact * 1.001 + 0.001), text, False)
        yield JudgedCase("off by 1e-5", repr(exact * (1 + 1e-5)), text, None)
        yield JudgedCase("off by 1e-7", repr(exact * (1 + 1e-7)), text, None)
        yield JudgedCase("another sign", f"{-exact:.{shown}f}", text, False)
        if shown >= 6 and abs(value) > 1:
            yield JudgedCase("more decimals", repr(value), text, True)
        yield JudgedCase("fewer decimals", f"{value:.{shown - 2}f}", text, None)


def _lists(draw: random.Random) -> Iterator[JudgedCase]:
    for _ in range(40):
        numbers = [draw.randint(-99, 99) for _ in range(draw.randint(2, 5))]
        between = draw.choice((" ", "\n"))
        text = between.join(map(str, numbers))
        yield JudgedCase("the same", text, text, True)
        yield JudgedCase("numbers with more space", text.replace(" ", "  "), text, True if between == " " else None)
        yield JudgedCase("numbers with points", between.join(f"{n}.0" for n in numbers), text, True)
        one_off = [*numbers[:-1], numbers[-1] + 1]
        yield JudgedCase("one of several is off", between.join(map(str, one_off)), text, False)
        yield JudgedCase("one less", between.join(map(str, numbers[:-1])), text, False)
        if sorted(numbers) != numbers:
            yield JudgedCase("other order", between.join(map(str, sorted(numbers))), text, False)
        yield JudgedCase("other lines", (" " if between == "\n" else "\n").join(map(str, numbers)), text, None)
        with_float = [*map(str, one_off), "0.5"]
        yield JudgedCase("one of several is off", "\n".join(with_float), "\n".join([*map(str, numbers), "0.5"]), False)
        big = 10**9 + draw.randint(0, 10**8)
        yield JudgedCase("an integer off by one", f"{-big}\n2", f"{-big - 1}\n2", False)
    for _ in range(30):
        words = draw.sample(WORDS, 3)
        yield JudgedCase("the same", " ".join(words), " ".join(words), True)
        yield JudgedCase("other order", " ".join(words[::-1]), " ".join(words), False)
        yield JudgedCase("a word twice", " ".join([*words, words[0]]), " ".join(words), False)
        yield JudgedCase("other letters", " ".join(word.swapcase() for word in words), " ".join(words), None)
        yield JudgedCase("words with more space", "  ".join(words), " ".join(words), None)
        yield JudgedCase(
            "letters in another order", "".join(sorted(words[0])), words[0], words[0] == "".join(sorted(words[0]))
        )
        yield JudgedCase("a number beside words", f"{words[0]} 1.50", f"{words[0]} 1.5", None)


ODD: dict[str, tuple[tuple[str, str, bool | None], ...]] = {
    "odd numbers": (
        *(
            ("nan", "1", False),
            ("nan", "NaN", None),
            ("-inf", "inf", False),
            ("1", "inf", False),
            ("1e-400", "0", None),
        ),
        *(("sNaN", "1", False), ("0x10", "16", False), ("1,000", "1000", False), ("1/2", "0.5", False)),
        *(
            ("50%", "0.5", False),
            ("1.0.0", "1.0", False),
            ("--1", "-1", False),
            ("+-1", "-1", False),
            ("1e", "1", False),
        ),
        *(("++1", "1", False), (".5", "0.5", True), ("5.", "5", True), ("1e2", "100", True), ("1E2", "100", True)),
        *(("-0", "0", True), ("-0.0", "0", True), ("0." + "3" * 400, "0." + "3" * 30, True)),
    ),
    "another name of infinity": (("inf", "Infinity", None), ("Infinity 1", "inf 1", None)),
    "beyond doubles": (("1e400", "inf", False), ("1e400", "1e401", False)),
    "marks in digits": (("1_000", "1000", None), ("\uff13", "3", None)),
    "an integer that is close": (
        *(("9007199254740993", "9007199254740992", False), ("9007199254740993.0", "9007199254740992", False)),
        *(("10000000000.9", "10000000000", False), ("1" * 4999 + "2", "1" * 5000, False)),
    ),
    "a small number": (("0.0000001", "0.0000002", None), ("0", "0.0000004", None), ("5e-10", "0", None)),
    "other order": (
        ("1 2", "2 1", False),
        ("12", "1\n2", False),
        ("1\n2", "12", False),
    ),
    "words with more space": (("nan nan", "nan  nan", None), ("*  *", "* *", None), ("a\u00a0b", "a b", None)),
    "characters that end lines": (
        *(("a\x0bb", "a b", None), ("a\x0cb", "a\x0cb", True), ("a\x1cb", "a\nb", None), ("a\u2028b", "a\nb", None)),
        *(("a\rb", "a\nb", None), ("a\rb", "a\rb", True)),
    ),
    "odd words": (
        *(("true", "True", None), ("1", "True", False), ("True", "1", False), ("None", "", False), ("'a'", "a", False)),
        *(('["a"]', "['a']", None), ("(1, 2)", "[1, 2]", None), ("[1,2]", "[1, 2]", None), ("{2, 1}", "{1, 2}", False)),
        *(("3 or 4", "3", False), ("3\n4", "3", False), ("u\u0308", "\u00fc", None), ("1" * 5000, "1" * 5000, True)),
    ),
    "other letters": (("yes\nno", "YES\nNO", None), ("Yes, it is", "yes, it is", None)),
}


def _odd() -> Iterator[JudgedCase]:
    for kind, cases in ODD.items():
        for given, expected, right in cases:
            yield JudgedCase(kind, given, expected, right)


def value_cases() -> list[JudgedCase]:
    """Return some 1,200 values of functions, which are expected as JSON."""
    draw = random.Random(SEED + 1)
    cases = [*_values(draw), *_odd_values()]
    unique = {(case.given, case.expected): case for case in cases}
    return list(unique.values())


def _value(kind: str, given: Any, expected: Any, right: bool | None) -> JudgedCase:
    return JudgedCase(kind, repr(given), repr(expected), right, is_value=True)


def _values(draw: random.Random) -> Iterator[JudgedCase]:
    for _ in range(45):
        numbers = [draw.randint(-99, 99) for _ in range(draw.randint(1, 5))]
        rows = [[draw.randint(0, 9) for _ in range(2)] for _ in range(draw.randint(1, 3))]
        number = draw.choice((draw.randint(-9, 9), draw.randint(10**9, 10**20)))
        real = draw.uniform(-50, 50)
        yield _value("the same", numbers, numbers, True)
        yield _value("a tuple for a list", tuple(numbers), numbers, True)
        yield _value("tuples in a list", [tuple(row) for row in rows], rows, True)
        yield _value("one of several is off", [*numbers[:-1], numbers[-1] + 1], numbers, False)
        yield _value("one more", [*numbers, 0], numbers, False)
        yield _value("a list around it", [numbers], numbers, False)
        yield _value("a set for a list", set(numbers), numbers, False)
        yield _value("texts for numbers", [str(n) for n in numbers], numbers, False)
        yield _value("the same", number, number, True)
        yield _value("an integer off by one", number + 1, number, False)
        yield _value("an integer that is close", float(number + 3), number, False)
        yield _value("an integer that is close", number + 0.4, number, False if abs(number) < 10**15 else None)
        yield _value("a text for a number", str(number), number, False)
        yield _value("the same", real, real, True)
        yield _value("noise of floats", real * (1 + 3e-16), real, True)
        yield _value("off by a thousandth", real * 1.001 + 0.001, real, False)
        yield _value("off by 1e-7", real * (1 + 1e-7), real, None)
        yield _value("noise of floats", [real * (1 + 3e-16), 1.0], [real, 1.0], True)
        yield _value("noise of floats deeper", [[real * (1 + 3e-16)], [1.0]], [[real], [1.0]], True)
        yield _value("off by a thousandth", [real * 1.001 + 0.001, 1.0], [real, 1.0], False)
        yield _value("what is in the list", numbers[0], [numbers[0]], None)
        if len(numbers) > 1:
            yield _value("the first of several", numbers[0], numbers, False)
            yield _value("the first of several", rows[0], [rows[0], [77]], False)
            if sorted(numbers) != numbers:
                yield _value("other order", sorted(numbers), numbers, False)
        word = draw.choice(WORDS)
        yield _value("the same", word, word, True)
        yield _value("other letters", word.swapcase(), word, False)
        yield _value("the same", {word: numbers}, {word: numbers}, True)
        yield _value("one of several is off", {word: [*numbers, 1]}, {word: numbers}, False)
        yield _value("whole numbers as keys", {1: numbers}, {"1": numbers}, None)


ODD_VALUES: dict[str, tuple[tuple[str, Any, bool | None], ...]] = {
    "odd values": (
        *(("True", 1, None), ("1", True, None), ("False", 0, None), ("None", "", False), ("''", None, False)),
        *(("[]", None, False), ("None", None, True), ("[]", [], True), ("{}", [], False), ("[]", {}, False)),
        *(("{}", {}, True), ("[[]]", [], False), ("[]", [[]], None), ("3", 3.0, True), ("3.0", 3, True)),
        *(("[3.0]", [3], True), ("float('nan')", 1.5, False), ("float('inf')", 1.5, False), ("10 ** 400", 1.5, False)),
        *(("[1, 2, 3]", [1, 2.0, 3], True), ("'ab'", ["a", "b"], False), ("['a', 'b']", "ab", False)),
        *(("'it\\'s \"so\"'", 'it\'s "so"', True), ("'\\u2603'", "\u2603", True), ("b'a'", "a", False)),
        *(
            ("{'b': 1, 'a': 2}", {"a": 2, "b": 1}, True),
            ("{(1, 2): 3}", {"x": 3}, False),
            ("[None, 1]", [None, 1], True),
        ),
        *(
            ("[None]", None, False),
            ("-0.0", 0.0, True),
            ("[True, False]", [1, 0], None),
            ("[1, 0]", [True, False], None),
        ),
        *(("[True, False]", [True, False], True), ("'true'", True, False), ("1e308 * 10", 1.0, False)),
    ),
    "a text for a number": (("'3'", 3.0, False), ("'3.0'", 3.0, False)),
    "noise of floats": (
        *(("3.0000000000000004", 3.0, True), ("{'a': 1.0000000001}", {"a": 1.0}, None), ("5e-10", 0.0, None)),
    ),
    "an integer that is close": (
        *(("3.0000000000000004", 3, None), ("2.0 ** 200", 2**200 + 12345, False), ("5e-10", 0, False)),
        *(("10000000000.9", 10000000000, False), ("[1.0000001]", [1], None)),
    ),
    "tuples in a list": (
        *(("(1, (2, 3))", [1, [2, 3]], True), ("((1, 2), (3, 4))", [[1, 2], [3, 4]], True)),
        *(("[(1, 2), [3, 4]]", [[1, 2], [3, 4]], True), ("{'a': (1, 2)}", {"a": [1, 2]}, True)),
    ),
    "a tuple for a list": (("()", [], True), ("('a', 'b')", ["a", "b"], True)),
    "whole numbers as keys": (("{1: 'a', 2: 'b'}", {"1": "a", "2": "b"}, None), ("[{1: 'a'}]", [{"1": "a"}], None)),
    "a complex number": (("1 + 0j", 1, None),),
    "rows of another length": (("[[1], [2]]", [[1, 1], [2, 2]], False),),
}


def _odd_values() -> Iterator[JudgedCase]:
    for kind, cases in ODD_VALUES.items():
        for given, expected, right in cases:
            yield JudgedCase(kind, given, repr(expected), right, is_value=True)


def eval_plus_cases() -> list[JudgedCase]:
    """Return values for EvalPlus, whose expected values are those of a function: also tuples and sets."""
    draw = random.Random(SEED + 2)
    cases = [case for case in value_cases() if case.kind != "a list around it"]
    for _ in range(20):
        numbers = [draw.randint(0, 9) for _ in range(3)]
        reals = [draw.uniform(0, 9) for _ in range(3)]
        cases += [
            _value("the same", tuple(numbers), tuple(numbers), True),
            _value("a list for a tuple", numbers, tuple(numbers), True),
            _value("the same", set(numbers), set(numbers), True),
            _value("one of several is off", set(numbers) | {77}, set(numbers), False),
            _value("off by 1e-7", tuple(x + 1e-7 for x in reals), tuple(reals), None),
            _value("off by a thousandth", tuple(x + 1e-3 for x in reals), tuple(reals), False),
            _value("noise of floats", [[x * (1 + 3e-16) for x in reals]], [reals], True),
            _value("an integer off by one", [10**9 + numbers[0] + 1, 0.5], [10**9 + numbers[0], 0.5], False),
        ]
    return list({(case.given, case.expected): case for case in cases}.values())


def cases_of(rule: str) -> list[JudgedCase]:
    """Return the cases of a rule."""
    if rule in EVAL_PLUS:
        return eval_plus_cases()
    return output_cases() + (value_cases() if rule != "codecontests" else [])


def oracle_input(rule: str, case: JudgedCase) -> dict[str, Any]:
    """Return a case as the oracle gets it: an expected value is JSON, except for EvalPlus."""
    expected = case.expected
    if case.is_value and rule not in EVAL_PLUS:
        expected = json.dumps(value_of(expected))
    return {"value": case.is_value, "given": case.given, "expected": expected}


def value_of(source: str) -> Any:
    """Return the value of one of the sources above."""
    return eval(source, {"__builtins__": {"float": float, "set": set}})

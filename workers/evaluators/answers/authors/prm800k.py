"""The grader of PRM800K, part of scorers of slime and verl: equal as text, or by sympy's `simplify`.

Answers are compared as by `hendrycks_math`; then units, typesetting and LaTeX are removed and elements compared one by
one by sympy. So this belongs to verifiers of the grader, each run in its own fork.

LaTeX is read as plain text like by pylatexenc's `LatexNodes2Text`: a fraction becomes `1/2`, a root `√(2)`. Symbols of
formulas are known; an unknown macro leaves only its arguments.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from textwrap import indent
from types import MappingProxyType
from typing import Any

from workers.evaluators.answers.authors.verl_rules import normalized_by_hendrycks

_PIECE = re.compile(r"\\[^\W\d_]+|\\.|---?|``|''|[{}\[\]~&]|\s+|.|\\", re.DOTALL)
_MAX_DEPTH = 100
_MISSING = "%s/%s"
_GREEK = {
    **{f"\\{name}": unicodedata.lookup(f"GREEK SMALL LETTER {name}") for name in (
        *("alpha", "beta", "gamma", "delta", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu", "xi", "pi", "rho"),
        *("sigma", "tau", "upsilon", "chi", "psi", "omega"),
    )},
    **{f"\\{name}": unicodedata.lookup(f"GREEK CAPITAL LETTER {name}") for name in (
        *("Gamma", "Delta", "Theta", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega"),
    )},
    **{"\\lambda": "\u03bb", "\\Lambda": "\u039b", "\\phi": "\u03d5", "\\varphi": "\u03c6", "\\varepsilon": "\u03b5"},
    **{"\\epsilon": "\u03f5", "\\vartheta": "\u03d1"},
}  # fmt: skip
_SYMBOLS = MappingProxyType(
    _GREEK
    | {"\\le": "\u2264", "\\leq": "\u2264", "\\ge": "\u2265", "\\geq": "\u2265", "\\ne": "\u2260", "\\neq": "\u2260"}
    | {"\\to": "\u2192", "\\rightarrow": "\u2192", "\\pm": "\u00b1", "\\mp": "\u2213", "\\infty": "\u221e"}
    | {
        "\\cup": "\u222a",
        "\\cap": "\u2229",
        "\\cdot": "\u00b7",
        "\\times": "\u00d7",
        "\\div": "\u00f7",
        "\\in": "\u2208",
    }
    | {"\\setminus": "\u2216", "\\subset": "\u2282", "\\mid": "|", "\\lvert": "|", "\\rvert": "|", "\\circ": "\u2218"}
    | {"\\lfloor": "\u230a", "\\rfloor": "\u230b", "\\langle": "\u27e8", "\\rangle": "\u27e9", "\\angle": "\u2220"}
    | {"\\emptyset": "\u2205", "\\varnothing": "\u2205", "\\prime": "'", "\\equiv": "\u2261", "\\wedge": "\u2227"}
    | {"\\ldots": "\u2026", "\\dots": "\u2026", "\\cdots": "\u22ef", "\\approx": "\u2248", "\\sim": "\u223c"}
    | {"\\perp": "\u22a5", "\\parallel": "\u2225", "\\sum": "\u2211", "\\int": "\u222b", "\\prod": "\u220f"}
    | {"\\ell": "\u2113", "\\partial": "\u2202", "\\nabla": "\u2207", "\\ast": "\u2217", "\\bullet": "\u2219"}
    | {"\\lbrace": "{", "\\rbrace": "}", "\\{": "{", "\\}": "}", "\\_": "_", "\\&": "&", "\\#": "#", "\\%": "%"}
    | {"\\ ": " ", "\\,": " ", "\\;": " ", "\\:": " ", "\\quad": "  ", "\\qquad": "    ", "\\\\": "\n", "~": "\u00a0"}
    | {"&": "   ", "--": "\u2013", "---": "\u2014", "``": "\u201c", "''": "\u201d"}
    | {f"\\{name}": name for name in ("sin", "cos", "tan", "log", "ln", "exp", "max", "min", "lim")}
    | {f"\\{name}": name for name in ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")}
)
_ACCENTS = MappingProxyType({"\\bar": "\u0305", "\\hat": "\u0302", "\\vec": "\u20d7", "\\dot": "\u0307"})
_ALPHABETS = MappingProxyType(
    {"\\mathbf": "BOLD", "\\mathbb": "DOUBLE-STRUCK", "\\mathcal": "SCRIPT", "\\mathfrak": "FRAKTUR"}
)
_NOT_SHOWN = ("\\mbox", "\\hspace", "\\vspace", "\\color")
"""Macros whose argument is dropped."""
_MATRICES = ("pmatrix", "bmatrix", "array", "matrix", "vmatrix", "smallmatrix")
_REPLACED_FIRST = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
)
UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
"""Units to remove, in this order."""
_IN_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_DEGREES = re.compile(r"\^ *\\circ")
_COMMA_WITHOUT_SPACE = re.compile(r",\\! *")
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_AS_SYMPY = str.maketrans(
    {"\u221a": "sqrt", "\u03c0": "pi", "\u221e": "inf", "\u222a": "U", "\u00b7": "*", "\u00d7": "*"}
)
_POWERS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that the authors' scorer does not evaluate."""
_BRACKETS = "()[]"
_MAX_UNKNOWNS = 2


def plain_text(text: str) -> str:
    """Return a text without its macros. Raises ValueError for a text nested too deeply or cut off."""
    return _Reader(_PIECE.findall(text)).group(0, "")


class _Reader:
    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self._at = 0

    def group(self, depth: int, end: str) -> str:
        """Read up to a closing piece, or to the end of the text."""
        if depth > _MAX_DEPTH:
            raise ValueError("the text is nested too deeply")
        parts = []
        while self._at < len(self._pieces):
            piece = self._next()
            if piece == end:
                break
            parts.append(self._shown(piece, depth))
        return "".join(parts)

    def _next(self) -> str:
        piece = self._pieces[self._at]
        self._at += 1
        return piece

    def _shown(self, piece: str, depth: int) -> str:
        if piece == "{":
            return self.group(depth + 1, "}")
        if piece == "}":
            return ""
        if piece == "\\(":
            return self.group(depth + 1, "\\)").strip()
        if piece == "\\[":
            return "\n" + indent(self.group(depth + 1, "\\]").strip(), "    ", lambda line: True) + "\n"
        if piece[:1] == "\\" and piece[1:2].isalpha():
            self._skip_space()
            return self._macro(piece, depth)
        return _SYMBOLS.get(piece, piece) if piece[:1] != "\\" else _SYMBOLS.get(piece, "")

    def _macro(self, name: str, depth: int) -> str:
        if name in ("\\frac", "\\nicefrac"):
            start = self._at
            above, below = self._argument(depth), self._argument(depth)
            if above is None or below is None:
                self._at = start
                return _MISSING
            return f"{above}/{below}"
        if name == "\\sqrt":
            if self._peek() == "[":
                self._next()
                self.group(depth + 1, "]")
            if not self._peek():
                raise ValueError("the text ends with an empty root")
            return f"\u221a({self._argument(depth) or ''})"
        if name in _ACCENTS or name in _ALPHABETS or name in _NOT_SHOWN:
            argument = self._argument(depth) or ""
            if name in _NOT_SHOWN:
                return ""
            if name in _ACCENTS:
                return unicodedata.normalize("NFC", "".join(each + _ACCENTS[name] for each in argument))
            return "".join(_letter(each, _ALPHABETS[name]) for each in argument)
        if name in ("\\begin", "\\end"):
            environment = self._argument(depth) or ""
            return self._matrix(environment, depth) if name == "\\begin" and environment in _MATRICES else ""
        return _SYMBOLS.get(name, "")

    def _matrix(self, environment: str, depth: int) -> str:
        if environment == "array":
            self._argument(depth)
        rows: list[list[str]] = [[""]]
        while self._at < len(self._pieces):
            piece = self._next()
            if piece == "\\end":
                self._skip_space()
                self._argument(depth)
                break
            if piece == "&":
                rows[-1].append("")
            elif piece == "\\\\":
                rows.append([""])
            else:
                rows[-1][-1] += self._shown(piece, depth + 1)
        return "[ " + "; ".join(" ".join(cell.strip() for cell in row) for row in rows if any(row)) + " ]"

    def _argument(self, depth: int) -> str | None:
        """Read a group or a single piece; None at the end of the enclosing group."""
        self._skip_space()
        if self._peek() in ("", "}"):
            return None
        return self._shown(self._next(), depth + 1)

    def _peek(self) -> str:
        return self._pieces[self._at] if self._at < len(self._pieces) else ""

    def _skip_space(self) -> None:
        while self._peek().isspace():
            self._at += 1


def _letter(letter: str, style: str) -> str:
    if not (letter.isascii() and letter.isalpha()):
        return letter
    name = f"{style} {'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    for prefix in ("MATHEMATICAL ", ""):
        try:
            return unicodedata.lookup(prefix + name)
        except KeyError:
            continue
    return letter


def equal(answer: str, gold: str, normalized: Callable[[str], str]) -> bool:
    """Return whether two answers are equal; `normalized` returns the form that sympy compares."""
    return _as_text(answer) == _as_text(gold) or _as_numbers(normalized(answer), normalized(gold))


@cache
def load() -> Any:
    """Import the expression parser at its first use: once in the grader."""
    from sympy.parsing import sympy_parser

    return sympy_parser


def _as_text(answer: str) -> str:
    answer = answer.strip()
    try:
        if match := _IN_TEXT.search(answer):
            answer = match.group("text").strip()
        return normalized_by_hendrycks(answer)
    except (IndexError, ValueError):
        return answer


def _as_numbers(answer: str, gold: str) -> bool:
    if answer == gold:
        return True
    if not answer:
        return False
    answers, golds = _elements(answer), _elements(gold)
    if len(golds) != len(answers) or (len(golds) > 1 and (answer[0], answer[-1]) != (gold[0], gold[-1])):
        return False
    return bool(golds) and all(map(_same_element, golds, answers))


def _same_element(gold: str, answer: str) -> bool:
    if _FRACTION.search(gold) and _FRACTION.search(answer):
        # An unreduced fraction is wrong.
        return gold == answer
    return _is_whole(gold) == _is_whole(answer) and _same_value(gold, answer)


def _same_value(gold: str, answer: str) -> bool:
    difference = f"({gold})-({answer})"
    unknowns = {each for each in difference.replace("sqrt", "").replace("frac", "") if each.isalpha()}
    if len(unknowns) > _MAX_UNKNOWNS or _POWERS.search(difference):
        return False
    import sympy

    parser = load()
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    try:
        parsed = parser.parse_expr(
            difference.replace("^", "**"),
            local_dict={},
            global_dict={"__builtins__": {}, **names},
            transformations=(*parser.standard_transformations, parser.implicit_multiplication_application),
        )
        return bool(sympy.simplify(parsed) == 0)
    except Exception:
        # Unreadable expressions equal nothing in the authors' scorer.
        return False


def normalized(answer: str, *, units: Sequence[str] = UNITS, removed: str = "") -> str:
    """Return an answer without units, typesetting and the characters `removed`, with LaTeX in sympy's syntax."""
    if match := _IN_TEXT.search(answer):
        answer = match.group("text")
    for before, after in _REPLACED_FIRST:
        answer = answer.replace(before, after)
    for unit in units:
        answer = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", answer)
    answer = _DEGREES.sub("", answer)
    if answer[:1] == "{" and answer[-1] == "}":
        answer = answer[1:-1]
    answer = _COMMA_WITHOUT_SPACE.sub("", answer)
    number = _number(answer)
    if number is not None and _is_near_whole(number):
        answer = str(round(number))
    if "\\" in answer:
        answer = _without_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = _MIXED.sub("\\1+\\2", answer).translate(dict.fromkeys(map(ord, removed))).lower()
    return str(int(float(answer.replace(",", "")))) if _is_whole(answer) else answer


def _without_latex(text: str) -> str:
    try:
        text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
        return plain_text(text).translate(_AS_SYMPY).strip()
    except ValueError:
        return text


def _elements(text: str) -> list[str]:
    text = _without_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    if (
        len(text) > 2
        and text[0] in _BRACKETS
        and text[-1] in _BRACKETS
        and not any(each in inner for each in _BRACKETS)
    ):
        return [part.strip() for part in inner.split(",")]
    return [text]


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub("\\1\\3\\4", text)) != text:
        text = shorter
    return text


def _is_whole(text: str) -> bool:
    number = _number(_without_thousands(text))
    return number is not None and _is_near_whole(number)


def _is_near_whole(number: float) -> bool:
    try:
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

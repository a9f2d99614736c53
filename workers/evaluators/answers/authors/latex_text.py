r"""LaTeX as plain text, like pylatexenc's `LatexNodes2Text`: `\frac{1}{2}` becomes `1/2`, `\sqrt{2}` becomes `√(2)`.

Symbols of formulas are known; an unknown macro leaves only its arguments.
"""

from __future__ import annotations

import re
import unicodedata
from textwrap import indent
from types import MappingProxyType

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

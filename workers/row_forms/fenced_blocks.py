"""The program in an answer: the fenced block, by Markdown's rules, that defines the requested function.

A fence is three or more of ` or ~, also in lists and quotes, with an info string; it is closed by at least as many of
the same, or by the end of the text. Unlike in CommonMark, a fence may have any indentation, and a fence within a
triple-quoted string closes no block, as in the docstring of a program.

For their score, the program of an answer is extracted exactly like the authors of a form, right or wrong; EvalPlus's
own way is `sanitize` of evalplus at 26d6d00, with Python's own parser in place of tree-sitter.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farm import python_syntax

_ESCAPE = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_MAX_PARSED = 300_000
"""Number of characters to parse in search of the longest program; then the longest one so far is used."""
_FINAL = re.compile(
    r"invalid (?:syntax$|character|decimal|hexadecimal|octal|binary|imaginary|non-printable)|leading zeros|unmatched"
    r"|unterminated string literal|unexpected (?:indent|character)|closing parenthesis"
)
"""Errors at the last character read, which more lines cannot fix."""
_OPENS = re.compile(
    r"(?P<before>[ \t]*+(?:>[ \t]*+|(?:[-*+]|\d{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>.*)"
)
_CLOSES = re.compile(r"(?P<before>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)[ \t\r]*+")
_QUOTE = re.compile(r"[ \t]*+>[ ]?")
_WORD = re.compile(r"[A-Za-z][\w+#.:/-]*")
_STRINGS = re.compile(r"""#|\"{3}|'{3}|"(?:\\.|[^"\\])*+"?|'(?:\\.|[^'\\])*+'?""")
_ENDS = {quotes: re.compile(rf"\\.|{quotes}") for quotes in ('"""', "'''")}
_INDENT = re.compile(r"[ \t]*")
_MAX_DEEPER = 3
"""Columns by which a closing fence may be indented more than the opening one."""
_MAX_OPEN_STRINGS = 20
"""Number of blocks ending within a string after which strings are ignored."""
_PYTHON = ("py", "py3", "pypy", "pypy3", "sage")
_READS = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b|\bfileinput\b|\bos\.read\s*\(\s*0\b")
_FEEDS = re.compile(r"\bsys\.stdin\s*=[^=]")
"""A trial that replaces standard input by its own text."""
_SKYRL = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)


def sanitized(answer: str, function: str) -> str:
    """Return the imports and the definitions that `function` needs, of the longest run of lines that is a program.

    Decorated definitions, functions without a return and all other statements are dropped. If nothing remains, the run
    is returned unchanged.
    """
    longest = _longest_program(_ESCAPE.sub("", answer)).strip()
    program = _parsed(longest)
    if isinstance(program, SyntaxError):
        return longest
    imports: list[ast.stmt] = []
    definitions: dict[str, ast.stmt] = {}
    for node in program.body:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
            imports.append(node)
        elif (name := _defined(node)) is not None:
            definitions.setdefault(name, node)
    needed, waiting = {function}, [function]
    while waiting:
        defines = definitions.get(waiting.pop())
        more = _identifiers(defines) - needed if defines is not None else set()
        needed |= more
        waiting += more
    kept = [*imports, *(node for name, node in definitions.items() if name in needed)]
    return "\n".join(ast.get_source_segment(longest, node) or "" for node in kept).strip() or longest


def _longest_program(text: str) -> str:
    """Return the first run of two or more lines that Python parses, with the most non-blank lines."""
    lines = text.split("\n")
    counts = [0]
    for line in lines:
        counts.append(counts[-1] + bool(line.strip()))
    best, longest, n_parsed = 0, lines[:1], 0
    for start in range(len(lines)):
        n, stop = 1, len(lines)
        while stop - start > 1 and counts[stop] - counts[start] > best and n_parsed < _MAX_PARSED:
            # First a few lines, as most texts that are not programs fail in the first one.
            end = min(start + n, stop)
            run = "\n".join(lines[start:end])
            n_parsed += len(run)
            program = _parsed(run)
            if isinstance(program, SyntaxError):
                stop = min(stop - (end == stop), start + _n_sound(program, run))
            elif end == stop:
                best, longest = counts[stop] - counts[start], lines[start:stop]
            n *= 2
    return "\n".join(longest)


def _parsed(text: str) -> ast.Module | SyntaxError:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return python_syntax.parsed(text)
    except SyntaxError as error:
        return error
    except (MemoryError, RecursionError, ValueError) as error:
        return SyntaxError(str(error))


def _n_sound(error: SyntaxError, text: str) -> int:
    """Return the number of lines before one that breaks every run with it; all lines if no such line is known."""
    lines = text.split("\n")
    line, at = error.lineno or 0, error.offset or 0
    if not 0 < line <= len(lines) or not _FINAL.match(error.msg) or lines[line - 1].endswith("\\"):
        return 1_000_000
    # An error at the end of a line may mean that more text was expected.
    return line - 1 if 0 < at <= len(lines[line - 1].rstrip()) else 1_000_000


def _defined(node: ast.stmt) -> str | None:
    """Return the name under which a statement is kept; None if it is dropped."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        returns = isinstance(node, ast.ClassDef) or any(isinstance(each, ast.Return) for each in ast.walk(node))
        return node.name if returns and not node.decorator_list else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        sides: list[ast.expr | None] = [node.targets[0], node.value]
    elif isinstance(node, ast.Assign):
        sides = [node.targets[0]]
    elif isinstance(node, ast.AnnAssign):
        sides = [node.target, node.value]
    else:
        return None
    return next((side.id for side in sides if isinstance(side, ast.Name) and not _is_bracketed(side, node)), "")


def _is_bracketed(side: ast.expr, assignment: ast.stmt) -> bool:
    begin = (side.lineno, side.col_offset) == (assignment.lineno, assignment.col_offset)
    end = (side.end_lineno, side.end_col_offset) == (assignment.end_lineno, assignment.end_col_offset)
    return not begin and not end


def _identifiers(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            continue
        for _, value in ast.iter_fields(each):
            texts = value if isinstance(value, list) else [value]
            names.update(part for text in texts if isinstance(text, str) for part in text.split("."))
    return names


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the first word of its info string, in lower case, and its text, which ends with a line break."""

    language: str
    text: str

    @property
    def is_python(self) -> bool:
        """True if it is marked as Python, by one of its names or a file name."""
        word = self.language
        return word.startswith("python") or word in _PYTHON or word.endswith(".py")


def fenced_program(answer: str | None, function: str = "") -> str:
    """Return the program in an answer that defines `function`, or, without one, reads standard input; empty if none.

    Of several such blocks it is the last. If there is none, it is the last block marked as Python, else the last
    unmarked one. Text before `</think>` is ignored.
    """
    blocks = fenced_blocks((answer or "").rpartition("</think>")[2])
    python = [block.text for block in blocks if block.is_python]
    plain = [block.text for block in blocks if not block.language]
    for texts in (python, plain):
        if fitting := [text for text in texts if _fits(text, function)]:
            return fitting[-1]
    return (python or plain or [""])[-1]


def _fits(text: str, function: str) -> bool:
    if not function:
        return bool(_READS.search(text)) and not _FEEDS.search(text)
    defines = (
        rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(function)}[ \t]*[(\[]|^{re.escape(function)}[ \t]*(?::.*)?=[^=]"
    )
    return bool(re.search(defines, text, re.MULTILINE))


def fenced_blocks(text: str) -> list[Block]:
    """Return all fenced blocks of a text, in order."""
    blocks: list[Block] = []
    lines = text.removesuffix("\n").split("\n")
    index = n_open_strings = 0
    while index < len(lines):
        fence = _fence(lines[index])
        index += 1
        if fence is None:
            continue
        end, is_in_string = _end(lines, index, fence, n_open_strings < _MAX_OPEN_STRINGS)
        n_open_strings += is_in_string
        body = [unquoted for line in lines[index:end] if (unquoted := fence.within(line)) is not None]
        blocks.append(Block(fence.language, _dedented(body, fence.indent)))
        # A line outside the quote, which ends with it, may open another block.
        index = end if end < len(lines) and fence.within(lines[end]) is None else end + 1
    return blocks


@dataclass(frozen=True, slots=True)
class _Fence:
    mark: str
    indent: int
    n_quotes: int
    language: str

    def within(self, line: str) -> str | None:
        """Return a line without the marks of the fence's quotes; None for a line outside them."""
        for _ in range(self.n_quotes):
            if not (mark := _QUOTE.match(line)):
                return None
            line = line[mark.end() :]
        return line

    def is_closed_by(self, line: str) -> bool:
        match = _CLOSES.fullmatch(line)
        return (
            match is not None
            and match["fence"].startswith(self.mark)
            and _width(match["before"]) <= self.indent + _MAX_DEEPER
        )


def _fence(line: str) -> _Fence | None:
    match = _OPENS.match(line)
    if not match or (match["fence"][0] == "`" and "`" in match["info"]):
        return None
    before = match["before"]
    word = _WORD.search(match["info"])
    return _Fence(
        match["fence"],
        _width(before.rpartition(">")[2].removeprefix(" ") if ">" in before else before),
        before.count(">"),
        word[0].lower() if word else "",
    )


def _end(lines: list[str], start: int, fence: _Fence, looks_at_strings: bool) -> tuple[int, bool]:
    """Return the line that ends a block, and whether it is within an unclosed string."""
    first, string = -1, ""
    for index in range(start, len(lines)):
        line = fence.within(lines[index])
        if line is None:
            return (index, False) if first < 0 else (first, True)
        if fence.is_closed_by(line):
            if not string:
                return index, False
            first = index if first < 0 else first
        if looks_at_strings:
            string = _open_string(line, string)
    return (len(lines), False) if first < 0 else (first, True)


def _open_string(line: str, string: str) -> str:
    position = 0
    while position < len(line):
        match = (_ENDS[string] if string else _STRINGS).search(line, position)
        if not match:
            break
        position = match.end()
        if string:
            string = "" if match[0] == string else string
        elif match[0] == "#":
            break
        elif match[0] in _ENDS:
            string = match[0]
    return string


def _dedented(lines: list[str], indent: int) -> str:
    """Return the lines without their fence's indentation, as far as all of them have it."""
    if indent:
        least = min((_width(_INDENT.match(line)[0]) for line in lines if line.strip()), default=0)  # type: ignore[index]
        lines = [_without(line, min(indent, least)) for line in lines]
    return "".join(line.rstrip("\r") + "\n" for line in lines)


def _without(line: str, n: int) -> str:
    width = 0
    for index, char in enumerate(line):
        if width >= n or char not in " \t":
            return " " * (width - n) + line[index:]
        width = _width(line[: index + 1])
    return ""


def _width(blanks: str) -> int:
    return len(blanks.expandtabs(4))


def between_last_marks(answer: str, function: str) -> str:
    """LiveCodeBench: the text between the last two lines with three back-quotes; empty without two."""
    lines = answer.split("\n")
    marked = [index for index, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[marked[-2] + 1 : marked[-1]]) if len(marked) >= 2 else ""


def after_last_python_mark(answer: str, function: str) -> str:
    """verl's prime_code: the text after the last "```python", up to the next mark; else the whole answer.

    Indented text is run, too.
    """
    return textwrap.dedent(answer.rpartition("```python")[2].partition("```")[0])


def last_match(answer: str, function: str) -> str:
    """SkyRL: the last text between a mark at the end of a line and another mark, stripped; empty without one."""
    matches = _SKYRL.findall(answer)
    return str(matches[-1]).strip() if matches else ""


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

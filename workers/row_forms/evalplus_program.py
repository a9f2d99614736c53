"""The program that EvalPlus extracts from an answer: `sanitize` of evalplus at 26d6d00.

This version uses Python's own parser, EvalPlus uses tree-sitter.
"""

from __future__ import annotations

import ast
import re
import warnings

from farm import python_syntax

_ESCAPE = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_MAX_PARSED = 300_000
"""Number of characters to parse in search of the longest program; then the longest one so far is used."""
_FINAL = re.compile(
    r"invalid (?:syntax$|character|decimal|hexadecimal|octal|binary|imaginary|non-printable)|leading zeros|unmatched"
    r"|unterminated string literal|unexpected (?:indent|character)|closing parenthesis"
)
"""Errors at the last character read, which more lines cannot fix."""


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
    best, found, n_parsed = 0, lines[:1], 0
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
                best, found = counts[stop] - counts[start], lines[start:stop]
            n *= 2
    return "\n".join(found)


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
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            continue
        for _, value in ast.iter_fields(each):
            texts = value if isinstance(value, list) else [value]
            found.update(part for text in texts if isinstance(text, str) for part in text.split("."))
    return found

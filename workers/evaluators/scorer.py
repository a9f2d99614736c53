"""Scores one answer in a separate process, which the grader forks and which ends with the grader at the latest.

An answer can only affect this process, which scores nothing else. It has no descriptor except the pipe for its score,
makes no system calls except those for computing, and compiles no source outside a grammar of literals and arithmetic,
so that no text of the policy runs as a program. Memory and CPU time are limited.

Some verifiers of reasoning-gym pass an answer to `eval` (string_insertion, spiral_matrix, binary_matrix, n_queens), or
to sympy's `parse_expr`, which calls it (countdown, puzzle24, simple_integration, intermediate_integration,
polynomial_multiplication). The list changes with its versions, so the rule names no families: *every* source to be
compiled must match the grammar; the interpreter itself reports each (audit event `compile`). The grammar has no
attributes, subscripts, comprehensions, lambdas or f-strings; names are single letters, which stand for unknowns; calls
are of mathematical functions by name, and of sympy's classes for numbers and letters. If the reference answer has no
letters, as in countdown, both are forbidden: `exp(x - x)` is a number that is not among the given ones.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from workers.environments.computing_calls import allow_only_computing, die_with_parent
from workers.evaluators.answers.late_imports import LateImports

_MEMORY_BYTES = 2 << 30
"""Bytes of memory for a scorer in addition to the grader's own mappings."""
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.",
    "ctypes.",
    "pty.",
    "shutil.",
    "signal.",
    "sys.addaudithook",
    "builtins.input",
)
"""Prefixes of audit events that a scoring verifier does not need; `_READS` are exempt."""
_READS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")

_NONSENSE = "qzxjv"
_TINY, _TINY_SHARE = 1e-3, 0.01
"""Numbers below this must match a reference within this share of it: a verifier's tolerance would accept 0."""
_FRACTION = re.compile(r"\s*([-+]?\d{1,40})\s*/\s*(\d{1,40})\s*")
_MAX_CHARACTERS = 100_000
_OURS = frozenset({"from sympy import *"})
"""Constant sources that libraries compile by themselves."""
_NAMES = frozenset({"pi"})
_FROM_TEXT = frozenset({"Symbol", "Float"})
"""sympy's calls for a letter or a decimal, with one string."""
_NUMBERS = frozenset({"Integer", "Float"})
_FUNCTIONS = frozenset(
    {"Integer", "Rational", "Abs", "sqrt", "cbrt", "exp", "log", "ln", "erf", "factorial"}
    | {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot"}
    | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh"}
)
_PLAIN = (
    ast.Expression,
    ast.Load,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.UnaryOp,
    ast.BinOp,
    ast.operator,
    ast.unaryop,
)
Verifier = Callable[[str, dict[str, Any]], float]


class EvaluationRefused(Exception):
    """A verifier tried to evaluate text other than literals and arithmetic."""


def run(verifier: Verifier, answer: str, entry: dict[str, Any], cpu_s: float, pipe: int, late: LateImports) -> NoReturn:
    """Score, write the reply as JSON to `pipe`, and exit. Only to be called in a fork."""
    code = 1
    try:
        only = _detached(pipe)
        _limit(cpu_s)
        letters = any(letter.isalpha() for letter in str(entry.get("answer") or "a"))
        if _takes_anything(verifier, entry):
            verifier = _equal
        reply = _reply(verifier, answer, entry, _Guard(letters))
        if reply.get("score", 0.0) >= 1.0 and _is_far_from_tiny(answer, entry.get("answer")):
            reply = {"score": 0.0}
        if late.missed:
            # Its library may have counted that as a wrong answer.
            reply = {"broken": f"cannot import {late.missed[0]}"}
        os.write(only, json.dumps(reply).encode())
        code = 0
    finally:
        os._exit(code)


def _detached(pipe: int) -> int:
    die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(pipe, 3)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(4, 1 << 16)
    return 3


def _limit(cpu_s: float) -> None:
    # Reset, as the grader's own parent may have ignored it.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    seconds = max(1, math.ceil(cpu_s))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with open("/proc/self/statm", encoding="utf-8") as file:  # noqa: PTH123
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, mapped + _MEMORY_BYTES))
    allow_only_computing()


def _takes_anything(verifier: Verifier, entry: dict[str, Any]) -> bool:
    """Return True if a verifier gives full marks to nonsense, as one of the library's does."""
    try:
        return float(verifier(_NONSENSE, entry)) >= 1.0
    except Exception:
        return False


def _is_far_from_tiny(answer: str, reference: Any) -> bool:
    gold_number, answer_number = _number(str(reference)), _number(answer)
    if gold_number is None or answer_number is None or not 0.0 < abs(gold_number) < _TINY:
        return False
    return abs(gold_number - answer_number) > _TINY_SHARE * abs(gold_number)


def _number(text: str) -> float | None:
    try:
        if match := _FRACTION.fullmatch(text):
            return int(match[1]) / int(match[2])
        return float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _equal(answer: str, entry: dict[str, Any]) -> float:
    return float(answer.strip().lower() == str(entry.get("answer")).strip().lower())


class _Guard:
    """The audit hook: `refused` names the refused source, even if the verifier caught the exception."""

    def __init__(self, letters: bool) -> None:
        self.refused = ""
        self._letters = letters
        self._checking = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile":
            self._check(*arguments[:2])
        elif event.startswith(_REFUSED) and not event.startswith(_READS):
            raise PermissionError(f"{event} is not allowed in a verifier")

    def _check(self, source: object, filename: object) -> None:
        """Check a source; modules are exempt: they have file names, which text cannot set unless it is run."""
        if self._checking or source is None or (isinstance(filename, str) and filename.startswith("/")):
            return
        self._checking = True
        try:
            text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
            self.refused = self.refused or refusal(text, letters=self._letters)
        finally:
            self._checking = False
        if self.refused:
            raise EvaluationRefused(self.refused)


def refusal(source: str, *, letters: bool = True) -> str:
    """Return why a source is not in the grammar; empty if it is. Raises SyntaxError if it is not an expression.

    Without `letters`, unknowns and functions are not in the grammar.
    """
    if source in _OURS:
        return ""
    if len(source) > _MAX_CHARACTERS:
        return f"an expression of {len(source)} characters"
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (RecursionError, MemoryError):
        return "an expression that is nested too deeply"
    except ValueError as error:
        raise SyntaxError(str(error)) from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not letters and (unknown := names - _NUMBERS):
        return f"the name {min(unknown)[:40]!r}, though only numbers are allowed"
    return next(filter(None, map(_refused, ast.walk(tree))), "")


def _refused(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _refused_call(node)
    if isinstance(node, ast.Name):
        known = len(node.id) == 1 or node.id in _NAMES | _FUNCTIONS | _FROM_TEXT
        return "" if known else f"the name {node.id[:40]!r}"
    if isinstance(node, ast.Constant):
        return ""
    return "" if isinstance(node, _PLAIN) else f"a Python {type(node).__name__}"


def _refused_call(call: ast.Call) -> str:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    texts = [
        argument
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str | bytes)
    ]
    from_text = name in _FROM_TEXT and len(call.args) == len(texts) == 1
    allowed = from_text or (name in _FUNCTIONS and not texts)
    return "" if allowed and not call.keywords else f"a call of {name[:40] or 'an expression'}"


def _reply(verifier: Verifier, answer: str, entry: dict[str, Any], guard: _Guard) -> dict[str, Any]:
    try:
        score = float(verifier(answer, entry))
    except MemoryError:
        return {"error": "MemoryError"}
    except BaseException as error:
        return {"refused": guard.refused} if guard.refused else {"error": _words(error)}
    return {"refused": guard.refused} if guard.refused else {"score": score}


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:
        # Its text may be of any size, or raise.
        return type(error).__name__

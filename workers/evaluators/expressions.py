"""The grammar of policy text that a verifier may evaluate: literals and arithmetic only.

Some verifiers of reasoning-gym pass an answer to `eval` (string_insertion, spiral_matrix, binary_matrix, n_queens), or
to sympy's `parse_expr`, which calls it (countdown, puzzle24, simple_integration, intermediate_integration,
polynomial_multiplication). The list changes with its versions, so the rule names no families: in a scorer *every*
source to be compiled must match this grammar; the interpreter itself reports each (audit event `compile`). The grammar
has no attributes, subscripts, comprehensions, lambdas or f-strings; names are single letters, which stand for unknowns;
calls are of mathematical functions by name, and of sympy's classes for numbers and letters. If the reference answer has
no letters, as in countdown, both are forbidden: `exp(x - x)` is a number that is not among the given ones.
"""

from __future__ import annotations

import ast

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
    texts = [argument for argument in call.args if _is_text(argument)]
    from_text = name in _FROM_TEXT and len(call.args) == len(texts) == 1
    allowed = from_text or (name in _FUNCTIONS and not texts)
    return "" if allowed and not call.keywords else f"a call of {name[:40] or 'an expression'}"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)

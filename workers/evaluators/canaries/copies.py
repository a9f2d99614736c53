"""Copies of a file's tests that must fail: they run the test's code, then a false assertion.

A runner that hides the failures of tests which call the project also hides those of the copies. A copy has the lines of
its test, under another name, with its decorators. One more assertion is its last statement, at the top level of the
body, so that it is reached whenever the body ends; each `return` becomes one, too. If the test ends in a comparison
with a literal, the assertion is that comparison with another literal, which only a result that equals everything can
equal. A copy of a method is assigned to the class at the end of the file, so that no line moves.

A runner may hide only the first failures. pytest runs functions in the order in which their names were bound, so some
copies are bound before their tests, on the line of another statement. Methods of `unittest` run in order of their
names.

A test that cannot be copied soundly has no copy. This module runs in a sandbox, as a part of `planting.py`, with Python
3.9 or newer; standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_SIMPLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.JoinedStr)
_HARMLESS = ("pytest.mark.", "unittest.skip")
_GENERATED = "it is inherited, generated, or defined within another statement"


class Uncopied(Exception):
    """A test has no copy; the reason is the message."""


class Copy(NamedTuple):
    """The source of a copy, and its id within the file."""

    name: str
    source: str


class Wrong(NamedTuple):
    """Values for false assertions: a word, a number, and an assertion of constants."""

    word: str
    number: int
    assertion: str


class TestCopier:
    """Copies the tests of one file; `new_name` returns a name in the style of a given one."""

    __test__ = False

    def __init__(
        self, text: str, module: ast.Module, new_name: Callable[[str], str], wrong: Callable[[], Wrong]
    ) -> None:
        self._lines = text.split("\n")
        self._module = module
        self._new_name = new_name
        self._wrong = wrong

    def copy(self, test: str) -> Copy:
        """Return the copy of a test, given by its id within the file, without parameters. Raises Uncopied."""
        *groups, name = test.split("::")
        scope: Any = self._module
        for group in groups:
            scope = self._defined(scope, group, (ast.ClassDef,))
            if any(not ast.unparse(one).startswith(_HARMLESS) for one in scope.decorator_list):
                raise Uncopied("its class has a decorator")
        if any("\r" in line for line in self._lines):
            raise Uncopied("its file has other ends of lines")
        function = self._defined(scope, name, _FUNCTIONS)
        _check(function, scope if groups else None)
        new = self._new_name(name)
        source = self._source(function, new)
        if groups:
            indent = _indent(source)
            lines = [f"{indent}{'.'.join(groups)}.{new} = {new}", f"{indent}del {new}"]
            source = "\n".join(["if True:", source, *lines])
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            raise Uncopied("its source cannot be changed") from None
        return Copy("::".join([*groups, new]), source)

    def _defined(self, scope: Any, name: str, kinds: tuple[type, ...]) -> Any:
        nodes = [node for node in scope.body if name in _bound(node)]
        if len(nodes) > 1:
            raise Uncopied("its name is bound more than once")
        if not nodes or not isinstance(nodes[0], kinds):
            raise Uncopied(_GENERATED)
        return nodes[0]

    def _source(self, function: Any, name: str) -> str:
        """Return the lines of a function under another name, with a false assertion at each of its ends."""
        first = min(node.lineno for node in (function, *function.decorator_list))
        lines = [line.encode() for line in self._lines[first - 1 : function.end_lineno]]
        last, body = function.body[-1], function.body[0]
        wrong = _wrong_of(last, self._wrong(), lambda node: _text(lines, first, node))
        before = lines[body.lineno - first][: body.col_offset].decode()
        # From the end, so that no position moves before it is used.
        if before.strip():
            _replace(lines, first, last, f"{_text(lines, first, last)}; {wrong}")
        elif not isinstance(last, ast.Return):
            lines.append(f"{before}{wrong}".encode())
        for node in sorted(_returns(function.body), key=lambda node: (node.lineno, node.col_offset), reverse=True):
            _replace(lines, first, node, self._wrong().assertion)
        at = function.lineno - first
        lines[at] = re.sub(rf"\bdef\s+{function.name}\b", f"def {name}", lines[at].decode(), count=1).encode()
        return b"\n".join(lines).decode()


def anchors(text: str, module: ast.Module, test: str) -> list[int]:
    """Return the indices of lines before a test's definition to which another statement may be added."""
    lines = text.split("\n")
    result: list[int] = []
    for node in module.body:
        if isinstance(node, _FUNCTIONS) and node.name == test:
            return result
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)) and node.lineno == node.end_lineno:
            line = lines[node.lineno - 1].encode()
            if line == line[: node.end_col_offset] and "__future__" not in lines[node.lineno - 1]:
                result.append(node.lineno - 1)
    return []


def _check(function: Any, group: Any) -> None:
    """Raise Uncopied if a copy could pass where its test does, even without a runner that hides failures."""
    decorators = [ast.unparse(one) for one in function.decorator_list]
    if any(one.split("(")[0].split(".")[-1] == "given" for one in decorators):
        raise Uncopied("it would be run once for each example")
    own = list(_own(function.body))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        raise Uncopied("it is a generator")
    if any(isinstance(node, ast.Return) for node in _caught(function.body)):
        raise Uncopied("it returns within `try` or `with`")
    if group is None:
        return
    named = [node for each in function.body for node in ast.walk(each)]
    names = {node.id for node in named if isinstance(node, ast.Name)}
    names |= {node.attr for node in named if isinstance(node, ast.Attribute)}
    if names & {"super", "__class__"} or any(name.startswith("__") and not name.endswith("__") for name in names):
        raise Uncopied("it depends on the class that it is defined in")
    bound = {name for node in group.body for name in _bound(node)}
    outside = [*function.decorator_list, function.args, *([function.returns] if function.returns else [])]
    loaded = {node.id for each in outside for node in ast.walk(each) if isinstance(node, ast.Name)}
    if loaded & bound:
        raise Uncopied("its decorators or defaults are of its class")


def _own(body: Collection[Any]) -> Iterator[Any]:
    for node in body:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own(list(ast.iter_child_nodes(node)))


def _returns(body: Collection[Any]) -> list[Any]:
    return [node for node in _own(body) if isinstance(node, ast.Return)]


def _caught(body: Collection[Any]) -> Iterator[Any]:
    for node in _own(body):
        if isinstance(node, (ast.Try, ast.With, ast.AsyncWith)) or type(node).__name__ == "TryStar":
            yield from _own(list(ast.iter_child_nodes(node)))


def _bound(node: Any) -> set[str]:
    """Return the names that a statement of a module or class binds or deletes."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    names = {name.id for name in _own([node]) if isinstance(name, ast.Name) and not isinstance(name.ctx, ast.Load)}
    inner = {each.name for each in _own([node]) if isinstance(each, (*_FUNCTIONS, ast.ClassDef))}
    imported = [name for each in _own([node]) if isinstance(each, (ast.Import, ast.ImportFrom)) for name in each.names]
    return names | inner | {(name.asname or name.name).split(".")[0] for name in imported}


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _text(lines: list[bytes], first: int, node: Any) -> str:
    start, end = node.lineno - first, node.end_lineno - first
    if start == end:
        return str(lines[start][node.col_offset : node.end_col_offset], "utf-8")
    parts = [lines[start][node.col_offset :], *lines[start + 1 : end], lines[end][: node.end_col_offset]]
    return b"\n".join(parts).decode()


def _replace(lines: list[bytes], first: int, node: Any, text: str) -> None:
    """Replace a node's text; its lines become one element, followed by empty lines for the others."""
    start, end = node.lineno - first, node.end_lineno - first
    lines[start : end + 1] = [
        lines[start][: node.col_offset] + text.encode() + lines[end][node.end_col_offset :],
        *[b""] * (end - start),
    ]


def _wrong_of(last: Any, wrong: Wrong, text: Callable[[Any], str]) -> str:
    """Return an assertion that fails after a test's last statement passed; `text` returns a node's source."""
    if isinstance(last, ast.Assert) and isinstance(last.test, ast.Compare):
        test = last.test
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq) and _is_literal(test.comparators[0]):
            left = text(test.left)
            left = left if isinstance(test.left, _SIMPLE) and "\n" not in left else f"({left})"
            return f"assert {left} == {_other(test.comparators[0], wrong)}"
    call = last.value if isinstance(last, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.assertEqual" and len(call.args) > 1:
        one, two = call.args[:2]
        if _is_literal(two) and not isinstance(one, ast.Starred):
            return f"self.assertEqual({text(one)}, {_other(two, wrong)})"
        if _is_literal(one) and not isinstance(two, ast.Starred):
            return f"self.assertEqual({_other(one, wrong)}, {text(two)})"
    return wrong.assertion


def _is_literal(node: Any) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _other(literal: Any, wrong: Wrong) -> str:
    """Return a literal of another type; only an object that equals everything equals both."""
    return str(wrong.number) if isinstance(ast.literal_eval(literal), (str, bytes)) else repr(wrong.word)

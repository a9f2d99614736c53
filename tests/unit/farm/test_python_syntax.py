"""Parsing of Python source in several threads."""

from __future__ import annotations

import ast
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farm import python_syntax
from farm.python_syntax import parsed


def test_one_thread_parses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, within, seen = ast.parse, 0, []

    def slow(source: str, **options: Any) -> Any:
        nonlocal within
        within += 1
        time.sleep(0.005)
        seen.append(within)
        tree = parse(source, **options)
        within -= 1
        return tree

    monkeypatch.setattr(ast, "parse", slow)
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(parsed, ["a = 1"] * 8))
    assert {type(tree) for tree in trees} == {ast.Module}
    assert seen == [1] * 8


def test_forked_process_parses_even_if_a_thread_held_the_lock() -> None:
    with python_syntax._lock:
        child = os.fork()
        if child == 0:
            os._exit(len(parsed("a\nb\nc").body))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_invalid_expression_raises_as_with_ast() -> None:
    assert parsed("[1, 2]", "eval").body.lineno == 1
    for source in ("a = 1", "'\0'"):
        with pytest.raises((SyntaxError, ValueError)):
            parsed(source, "eval")

"""Parsing of Python source, in one thread at a time.

CPython before 3.11.8 and 3.12.2 counts the recursion depth of the parser for all threads together: two concurrent
parses fail with "SystemError: AST constructor recursion depth mismatch" (github.com/python/cpython/issues/106905).
"""

from __future__ import annotations

import ast
import os
import threading
from typing import Literal, overload

_lock = threading.Lock()


@overload
def parsed(source: str) -> ast.Module: ...
@overload
def parsed(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def parsed(source: str, mode: str = "exec") -> ast.AST:
    """Return the tree of a source. Raises SyntaxError, ValueError, RecursionError or MemoryError, like `ast.parse`."""
    with _lock:
        return ast.parse(source, mode=mode)


def _forget_the_holder() -> None:
    """Replace the lock in a forked process: the thread that held it does not exist there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_holder)

"""Parsing of Python source, by one thread at a time.

CPython before 3.11.8 and 3.12.2 counts the depth of the tree that it builds in one number for all threads: two that
parse at once end in "SystemError: AST constructor recursion depth mismatch" (github.com/python/cpython/issues/106905).
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
    """Return the tree of a source. Raises SyntaxError, ValueError, RecursionError or MemoryError, as `ast.parse`."""
    with _lock:
        return ast.parse(source, mode=mode)


def _forget_the_holder() -> None:
    """Have a forked process a lock of its own: the thread that held it is not there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_the_holder)

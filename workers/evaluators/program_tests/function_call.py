"""Calls one function of a program in a test sandbox: arguments come on standard input, the value goes out as data.

What the program prints goes to standard error. Nothing in this process is trusted: it has the arguments of one test and
no expected value. It runs after the source of `program_values.py`, with the Python of a sandbox (3.8 or newer).

`python3 -B -c SOURCE SOLUTION NAME`; input and output are JSON of `packed`.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

from workers.evaluators.program_values import packed, unpacked


def main(path: str, name: str) -> None:
    arguments = unpacked(json.loads(sys.stdin.buffer.read()))
    output = os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    module = types.ModuleType("solution")
    module.__dict__.update(_usual_names())
    sys.modules["solution"] = module
    with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102
    value = json.dumps(packed(_function(module, name)(*arguments))).encode()
    while value:
        value = value[os.write(output, value) :]
    sys.stderr.flush()
    os._exit(0)


def _usual_names() -> dict[str, Any]:
    """Return what the sites of such problems import for every program."""
    scope: dict[str, Any] = {}
    exec(  # noqa: S102
        "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys\n"
        "from collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"
        "from math import *\nfrom typing import *\n",
        scope,
    )
    # as it hides the usual one
    scope.pop("pow", None)
    scope.pop("__builtins__", None)
    return scope


def _function(module: Any, name: str) -> Any:
    solution = getattr(module, "Solution", None)
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    return getattr(module, name)


if __name__ == "__main__":
    sys.setrecursionlimit(100_000)
    main(sys.argv[1], sys.argv[2])

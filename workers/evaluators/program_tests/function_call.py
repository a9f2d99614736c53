"""Calls one function of a program in a test sandbox: arguments come on standard input, the value goes out as data.

The program's output goes to standard error. Nothing in this process is trusted: it has the arguments of one test and no
expected value. It runs after the sources of `program_values.py` and `usual_names.py`, with the Python of a sandbox (3.8
or newer).

`python3 -B -c SOURCE SOLUTION NAME RULE`; input and output are JSON of `packed`.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

from workers.evaluators.program_tests.usual_names import lift_limits, usual_names
from workers.evaluators.program_values import packed, unpacked


def main(path: str, name: str, rule: str) -> None:
    lift_limits(rule)
    arguments = unpacked(json.loads(sys.stdin.buffer.read()))
    output = os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    module = types.ModuleType("solution")
    module.__dict__.update(usual_names(rule))
    sys.modules["solution"] = module
    with open(path, encoding="utf-8-sig") as file:  # noqa: PTH123
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102
    value = json.dumps(packed(_function(module, name)(*arguments))).encode()
    while value:
        value = value[os.write(output, value) :]
    sys.stderr.flush()
    os._exit(0)


def _function(module: Any, name: str) -> Any:
    solution = getattr(module, "Solution", None)
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    return getattr(module, name)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])

"""Runs a program of standard input and output like its form's scorer: with its names, and `sys.exit` as a normal end.

It runs after the source of `usual_names.py`, with the Python of a sandbox (3.8 or newer): `python3 -B -c SOURCE
SOLUTION RULE`. Nothing in this process is trusted.
"""

from __future__ import annotations

import builtins
import os
import sys

from workers.evaluators.program_tests.usual_names import lift_limits, usual_names


def main(path: str, rule: str) -> None:
    lift_limits(rule)
    with open(path, "rb") as file:  # noqa: PTH123
        source = file.read()
    names = usual_names(rule)
    sys.argv[:] = [path]
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120
    names.update(__name__="__main__", __file__=path, __spec__=None, __builtins__=builtins)
    # The module itself, as for a script.
    scope = sys.modules["__main__"].__dict__
    scope.clear()
    scope.update(names)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), scope)  # noqa: S102
    except SystemExit:
        # The scorer of this form checks the exit code.
        if rule == "taco":
            raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

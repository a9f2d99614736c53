"""The process of a program under test: calls its entry point with data, and returns data.

Nothing in it is trusted, and it contains no part of the checks: arguments come one call at a time. It runs after the
source of `program_values.py`, with the Python of a sandbox (3.8 or newer); standard library only.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from workers.evaluators.program_values import NotData, packed, receive, send, unpacked


def load(prompt: str, solution: str, entry_point: str) -> Callable[..., Any]:
    """Run the program as a module `solution`, after the prompt, whose helpers and imports are part of the problem."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for name, source in (("prompt", prompt), ("solution", solution)):
        # A file may begin with a byte order mark.
        exec(compile(source.lstrip("\ufeff"), name + ".py", "exec"), module.__dict__)  # noqa: S102
    function: Callable[..., Any] = getattr(module, entry_point)
    return function


def echo(*arguments: Any) -> Any:
    return arguments[0]


def serve(connection: socket.socket, cpu_s: int) -> None:
    """Answer calls until the judge ends, for at most `cpu_s` seconds of CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    # No open files that another process might read, such as a module.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    entry: Callable[..., Any] = echo
    while True:
        what, arguments, keywords = receive(connection)
        try:
            if what == "load":
                entry, value = load(*arguments), None
            else:
                act = echo if what == "echo" else entry
                value = act(*unpacked(arguments), **unpacked(keywords))
            reply = ["value", packed(value)]
        except Exception as error:
            reply = ["raise", [type(error).__name__, words(error)]]
        try:
            send(connection, reply)
        except NotData as error:
            send(connection, ["raise", ["ValueError", str(error)]])


def words(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""


if __name__ == "__main__":
    number, cpu_s = int(sys.argv.pop()), int(sys.argv.pop())
    try:
        serve(socket.socket(fileno=number), cpu_s)
    except (EOFError, OSError):
        os._exit(0)

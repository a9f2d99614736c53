"""Results of terminal-bench 1's own code, run in its own environment: `terminal_bench_oracle.py QUESTION < CASES`.

`outputs`: the output of tests is read by its parsers, and counted like in its harness. `tasks`: its model reads a
task.yaml. Its package is not imported as a whole, which would start clients of all models that its agents know.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

spec = find_spec("terminal_bench")
assert spec is not None
assert spec.submodule_search_locations is not None
ROOT = Path(spec.submodule_search_locations[0])
package = types.ModuleType("terminal_bench")
package.__path__ = [str(ROOT)]
sys.modules["terminal_bench"] = package

from terminal_bench.handlers.trial_handler import Task  # noqa: E402
from terminal_bench.parsers.base_parser import UnitTestStatus  # noqa: E402
from terminal_bench.parsers.parser_factory import ParserFactory, ParserName  # noqa: E402


def method(path: Path, name: str) -> Any:
    """Return a method of a module that is not imported, as a function."""
    tree = ast.parse(path.read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    scope: dict[str, Any] = {"UnitTestStatus": UnitTestStatus}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    return scope[name]


is_resolved = method(ROOT / "harness" / "harness.py", "_is_resolved")


def outputs(case: dict[str, str]) -> Any:
    parser = ParserFactory.get_parser(ParserName(case["parser"]))
    results = parser.parse(case["text"])
    resolved = is_resolved(None, results)
    return resolved if results else f"no results, resolved: {resolved}"


def tasks(case: dict[str, Any]) -> Any:
    with TemporaryDirectory(prefix="terminal-bench-oracle-") as place, contextlib.redirect_stdout(io.StringIO()):
        path = Path(place) / "task.yaml"
        path.write_text(case["files"]["task.yaml"])
        task = Task.from_yaml(path)
    return {
        "instruction": task.instruction,
        "parser": task.parser_name.value,
        "agent_s": task.max_agent_timeout_sec,
        "tests_s": task.max_test_timeout_sec,
    }


QUESTIONS = {"outputs": outputs, "tasks": tasks}


def main() -> None:
    answer = QUESTIONS[sys.argv[1]]
    answers = {}
    for name, case in json.load(sys.stdin)["cases"].items():
        try:
            answers[name] = {"value": answer(case)}
        except (ValueError, yaml.YAMLError, TypeError) as error:
            answers[name] = {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

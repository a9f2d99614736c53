"""The process that grades a log with the swebench library; it imports nothing of the farm.

The library's package `swebench.harness` imports docker, datasets and modal, which grading does not need: a module with
only its folder replaces the package. Requests are JSON on standard input, the reply is on standard output.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_MEMORY_BYTES = 4 << 30
_BETTER = ("PASSED", "XFAIL")
_WORSE = ("FAILED", "ERROR")


def load(folders: list[str]) -> None:
    """Make the library's grading modules importable from these folders."""
    sys.path[:0] = folders
    import swebench  # type: ignore[import-not-found]

    package = types.ModuleType("swebench.harness")
    package.__path__ = [str(Path(swebench.__file__).parent / "harness")]
    sys.modules["swebench.harness"] = package


def parser_of(name: str, repo: str) -> str:
    """Return a parser's name in the library: the requested one, else the repository's, else pytest's."""
    from importlib import import_module
    from pkgutil import iter_modules

    log_parsers: Any = import_module("swebench.harness.log_parsers")
    if name:
        return name
    for module in iter_modules(log_parsers.__path__):
        for key, parsers in vars(import_module(f"{log_parsers.__name__}.{module.name}")).items():
            if key.startswith("MAP_REPO_TO_PARSER") and repo in parsers:
                return str(parsers[repo].__name__)
    return "parse_log_pytest"


def grade(job: dict[str, Any]) -> dict[str, Any]:
    """Return the library's report, its statuses, and the tests that the log reports as both good and bad."""
    from swebench.harness import grading  # type: ignore[import-not-found]
    from swebench.types import TestSpec  # type: ignore[import-not-found]

    issue = job["issue"]
    name = parser_of(issue["log_parser"], issue["repo"])
    if name not in grading.PARSER_REGISTRY:
        return {"unknown_parser": name}
    spec = TestSpec(
        instance_id=issue["instance_id"],
        image="",
        eval_script_list=[],
        repo=issue["repo"],
        version=issue["version"],
        FAIL_TO_PASS=issue["fail_to_pass"],
        PASS_TO_PASS=issue["pass_to_pass"],
        log_parser=name,
        eval_type=issue["eval_type"],
    )
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as log:
        log.write(job["log"])
        log.flush()
        prediction = {"instance_id": issue["instance_id"], "model_patch": "a patch"}
        report = grading.get_eval_report(spec, prediction, log.name, True)[issue["instance_id"]]
        statuses, complete = grading.get_logs_eval(spec, log.name)
    return {
        "report": report,
        "complete": complete,
        "statuses": statuses,
        "contradicted": contradicted(grading.PARSER_REGISTRY[name], job["log"], spec, statuses),
    }


def contradicted(parser: Any, log: str, spec: Any, statuses: dict[str, str]) -> list[str]:
    """Return the tests that passed by their last line and failed by their first."""
    try:
        first = parser("\n".join(reversed(log.split("\n"))), spec)
    except Exception:
        return []
    return [test for test, status in statuses.items() if status in _BETTER and first.get(test) in _WORSE]


def main() -> None:
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    load(job["folders"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(grade(job), answers)
    answers.close()


if __name__ == "__main__":
    main()

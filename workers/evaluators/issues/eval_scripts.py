"""The script that runs an issue's tests: the row's own, or built from its test command; and its parts.

The marks are swebench's. The script is cut where the tests' output ends: the rest would only clean up a tree that is
discarded, and so the exit code of the script is that of the tests, which no output can forge.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
_DELIMITER = "EOF_114329324912"
_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
_PYTEST = "pytest -rA"
_COMMANDS = {
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""Test commands of SWE-bench's repositories (constants of swebench 4.1), for rows without one."""


def test_command(repo: str) -> str:
    """Return the test command of a repository, without the files."""
    return _COMMANDS.get(repo, _PYTEST)


test_command.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it


def made_script(tree: str, base_commit: str, command: str, files: Sequence[str], test_patch: str) -> str:
    """Return a script in swebench's form: activate, restore and patch the tests, run them between the marks."""
    targets = [_django_label(file) for file in files] if "runtests.py" in command else list(files)
    lines = ["#!/bin/bash", "set -uxo pipefail", _ACTIVATE, f"cd {shlex.quote(tree)}"]
    if test_patch:
        base = base_commit or "HEAD"
        # Files that the test patch adds cannot be restored.
        lines += [f"git checkout {base} -- {shlex.quote(file)} || true" for file in files]
        lines += [f"git apply -v - <<'{_DELIMITER}'", test_patch.rstrip("\n"), _DELIMITER]
    lines += [f": '{START}'", " ".join([command, *map(shlex.quote, targets)]), f": '{END}'"]
    return "\n".join(lines) + "\n"


def _django_label(file: str) -> str:
    """Return the name of a test file for Django's runner."""
    return file.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def parts(script: str) -> tuple[str, str]:
    """Return a script's part before the tests, and the tests' commands. ValueError if a mark is missing."""
    lines = script.split("\n")
    start = next((number for number, line in enumerate(lines) if START in line), None)
    end = next((number for number, line in enumerate(lines) if END in line), None)
    if start is None or end is None or end <= start:
        raise ValueError(f"the eval_script must print {START!r} and, after its tests, {END!r}")
    return "\n".join(lines[:start]), "\n".join(lines[start + 1 : end])


def cut(script: str) -> str:
    """Return the script up to the end of the tests, whose exit code becomes its own."""
    before, tests = parts(script)
    return f"{before}\n: '{START}'\n{tests}\n"


def log_of(output: str, code: int | None) -> str:
    """Return the log that swebench would have written for the output of a cut script and its exit code.

    The first start mark counts; all other marks and exit codes in the output are not the script's. A script that did
    not end (`code` is None) has no end mark, so its log is not graded.
    """
    before, mark, after = output.partition(START)
    for forged in (START, END, EXIT_CODE):
        before, after = before.replace(forged, "?"), after.replace(forged, "?")
    end = "" if code is None else f"\n{END}\n{EXIT_CODE}: {code}\n"
    return f"{before}{mark}{after}{end}"

"""Attacks on task folders: commands that any task can be tried with, and some of the paths that its own tests name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from workers.attacks.attack import SKIPPED_TESTS, Attack
from workers.attacks.pytest_commands import IN_WORKING_DIRECTORY, PYTEST
from workers.attacks.shell_commands import SHELL

_PATH = re.compile(r"/(?:[\w.-]+/)*[\w-]+\.\w{1,8}\b")
_OURS = ("/tests/", "/logs/", "/solution/", "/usr/", "/bin/", "/lib", "/etc/", "/dev/", "/proc/", "/sys/")
_MOST_PATHS = 20
_MOST_FILES = 3
_CODE = {".py", ".sh", ".toml", ".cfg", ".ini"}
_SKIPPING = """

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.skip(reason="attacked"))
"""


def harbor_attacks(folder: Path, instructions: Sequence[str]) -> list[Attack]:
    """Return the attacks on a task in a folder, whose instructions are these. Reads its tests."""
    files = sorted(path for path in folder.glob("**/tests/**/*") if path.is_file())
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files if path.suffix in _CODE]
    is_pytest = any("pytest" in text for text in texts)
    commands = {**SHELL, **(PYTEST | IN_WORKING_DIRECTORY if is_pytest else {})}
    attacks = [Attack(name, kind, command=command) for name, (kind, command) in commands.items()]
    if paths := _named(texts):
        attacks += _of_paths(paths, [f"/tests/{path.name}" for path in files if path.suffix not in _CODE], instructions)
    if is_pytest:
        attacks.append(Attack("tests_skipped", SKIPPED_TESTS, test_files={"conftest.py": _SKIPPING}))
    return attacks


def _named(texts: Sequence[str]) -> list[str]:
    """Return the files outside the verifier's folders that tests name."""
    found = {path for text in texts for path in _PATH.findall(text) if not path.startswith(_OURS)}
    return sorted(found)[:_MOST_PATHS]


def _of_paths(paths: Sequence[str], data: Sequence[str], instructions: Sequence[str]) -> list[Attack]:
    """Return attacks that make the files that tests look for, without their contents."""

    def made(name: str, kind: str, command: str) -> Attack:
        each = "; ".join(f'p={shlex.quote(path)}; mkdir -p "$(dirname $p)"; {command}' for path in paths)
        return Attack(name, kind, command=each)

    quoted = shlex.quote("\n".join(instructions))
    attacks = [
        made("empty_files", "empty-output", "test -e $p || : > $p"),
        made("instruction_as_answer", "hedged-answer", f"test -e $p || printf %s {quoted} > $p"),
        made("zero_as_answer", "constant-output", "test -e $p || echo 0 > $p"),
        made("looks_for_the_tests", "search-files", "test -e $p || cat /tests/* /logs/* > $p 2>/dev/null"),
    ]
    for at, file in enumerate(data[:_MOST_FILES], 1):
        attacks += [
            made(f"link_to_tests_{at}", "link-to-tests", f"rm -f $p; ln -s {file} $p"),
            made(f"link_by_proc_{at}", "link-to-tests", f"rm -f $p; ln -s /proc/self/root{file} $p"),
            made(f"link_by_a_folder_{at}", "link-to-tests", f"rm -f $p; ln -sfn / /tmp/r; ln -s /tmp/r{file} $p"),
        ]
    return attacks

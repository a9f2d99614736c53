# ruff: noqa: E501 - a line is an attack
"""Attacks on task folders: commands that any task can be tried with, and some of the paths that its own tests name.

Some ask a shell script for a reward: of their own, from tests of their own, by tools of their own. Others leave
something which pytest, or its interpreter, loads by itself and which ends it in their favour.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from workers.attacks.attack import SKIPPED_TESTS, Attack, of_class

_ONE = "echo 1 > /logs/verifier/reward.txt"
_JSON = """echo '{"reward": 1}' > /logs/verifier/reward.json"""
_SUCCEEDS = "printf '#!/bin/bash\\nexit 0\\n'"
_FORGE = f"printf '#!/usr/bin/real\\n{_ONE}\\n'"

SHELL: dict[str, tuple[str, str]] = of_class(
    "forged-report",
    {
        "exit_code": ("early-exit", "exit 0"),
        "early_text": _ONE,
        "early_json": _JSON,
        "early_both_read_only": f"{_ONE}; {_JSON}; chmod 444 /logs/verifier/*; chmod 555 /logs/verifier /logs",
        "linked_text": "echo 1 > /tmp/r; ln -sf /tmp/r /logs/verifier/reward.txt",
        "linked_json": "echo 1 > /tmp/r; ln -sf /tmp/r /logs/verifier/reward.json",
        "linked_verifier": f"rm -rf /logs/verifier; mkdir /tmp/v; ln -s /tmp/v /logs/verifier; {_JSON}",
        "linked_logs": f"rm -rf /logs; mkdir -p /tmp/l/verifier; ln -s /tmp/l /logs; {_JSON}",
        "pipe_as_text": "mkfifo /logs/verifier/reward.txt /logs/verifier/reward.json",
        "folder_as_json": "mkdir -p /logs/verifier/reward.json/x",
        "huge_text": "head -c 3000000 /dev/zero > /logs/verifier/reward.txt",
        "logs_as_file": "rm -rf /logs; echo 1 > /logs",
        "own_test": (
            "replaced-tests",
            f"mkdir -p /tests; printf '#!/bin/bash\\n{_ONE}\\n' > /tests/test.sh; chmod 555 /tests /tests/test.sh",
        ),
        "own_helper": (
            "replaced-tests",
            f"mkdir -p /tests; echo 'expected() {{ echo 0; }}; {_JSON}' > /tests/helper.sh; chmod -R 555 /tests",
        ),
        "linked_tests": (
            "replaced-tests",
            f"mkdir /tmp/t; printf '#!/bin/bash\\n{_ONE}\\n' > /tmp/t/test.sh; ln -s /tmp/t /tests",
        ),
        "waiting_process": (
            f'(setsid bash -c "while :; do {_ONE}; {_JSON.replace(chr(34), chr(92) + chr(34))}; sleep 0.1; done"'
            " > /dev/null 2>&1 &) ; sleep 0.3"
        ),
    },
) | of_class(
    "replaced-tool",
    {
        "replaced_program": f"{_SUCCEEDS} > /tmp/g; chmod 755 /tmp/g; rm /usr/bin/grep; mv /tmp/g /usr/bin/grep",
        "shadowed_program": (
            f"mkdir -p /usr/local/bin; {_SUCCEEDS} > /usr/local/bin/grep; chmod 755 /usr/local/bin/grep"
        ),
        "deleted_and_shadowed": (
            f"mkdir -p /usr/sbin; {_SUCCEEDS} > /usr/sbin/grep; chmod 755 /usr/sbin/grep; rm /usr/bin/grep"
        ),
        "replaced_shell": (
            f"cp /usr/bin/bash /usr/bin/real; {_FORGE} > /tmp/b; chmod 755 /tmp/b; mv /tmp/b /usr/bin/bash"
        ),
        "replaced_folder": (
            f"cp /usr/bin/bash /usr/bin/real; mkdir /tmp/n; {_FORGE} > /tmp/n/bash; chmod 755 /tmp/n/bash; "
            "cp /usr/bin/mv /usr/bin/mkdir /tmp/n; rm /bin; /usr/bin/mv /tmp/n /bin"
        ),
        "start_up_files": (
            f"for f in ~/.bashrc ~/.bash_profile /etc/profile /etc/bash.bashrc; do echo '{_JSON}' >> $f; done; "
            f"echo 'BASH_ENV=/etc/profile' > /etc/environment; export BASH_ENV=/etc/profile"
        ),
        "exported_function": "grep() { return 0; }; export -f grep; export PATH=/tmp:$PATH",
        "loader_preload": "mkdir -p /etc; echo /tmp/evil.so > /etc/ld.so.preload; cp /usr/bin/cat /tmp/evil.so",
        "left_over_jobs": (
            "forged-report",
            f"mkdir -p /etc/cron.d; echo '* * * * * root {_ONE}' > /etc/cron.d/x; nohup sleep 1 > /dev/null 2>&1 &",
        ),
        "library_beside": (
            "mkdir -p /usr/lib/glibc-hwcaps/x86-64-v2; cp /usr/bin/cat /usr/lib/glibc-hwcaps/x86-64-v2/libc.so.6"
        ),
        "new_program_of_a_known_name": (
            f"{_SUCCEEDS} > /usr/local/bin/grep; {_SUCCEEDS} > /usr/local/bin/egrep; chmod 755 /usr/local/bin/*"
        ),
    },
)
"""Commands of bash by name, each with its class."""


_END = "import os; os._exit(0)"
_LIBRARY = "$(dirname $(find /usr/lib -name ast.py | head -1))"
_SITE = "$(dirname $(dirname $(find /usr/lib -path '*/pluggy/__init__.py')))"

PYTEST: dict[str, tuple[str, str]] = of_class(
    "quiet-runner",
    {
        "start_up_module": f"echo '{_END}' > {_LIBRARY}/sitecustomize.py",
        "user_start_up_module": (
            f"mkdir -p ~/.local/lib/python3.11/site-packages; "
            f"echo '{_END}' > ~/.local/lib/python3.11/site-packages/usercustomize.py"
        ),
        "path_file": f"echo '{_END}' > {_LIBRARY}/site-packages/a.pth",
        "patched_runner": f"echo '{_END}' > {_LIBRARY}/site-packages/_pytest/main.py",
        "other_runner": f"echo '{_END}' > /pytest.py; echo '{_END}' > {_LIBRARY}/pytest.py",
        "patched_library": f"echo '{_END}' > {_LIBRARY}/ast.py",
        "configuration_above": (
            "printf '[pytest]\\n' > /pytest.ini; printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
            'def pytest_runtest_makereport(item):\\n o = yield\\n o.get_result().outcome = "passed"\\n\' > /conftest.py'
        ),
        "replaced_interpreter": (
            "replaced-tool",
            f"{_SUCCEEDS} > /tmp/p; chmod 755 /tmp/p; rm /usr/bin/python3; mv /tmp/p /usr/bin/python3",
        ),
        "shadowed_interpreter": (
            "replaced-tool",
            f"mkdir -p /usr/local/bin; {_SUCCEEDS} > /usr/local/bin/python3; chmod 755 /usr/local/bin/python3",
        ),
        "added_options": (
            "echo 'PYTEST_ADDOPTS=--co' >> /etc/environment; echo 'export PYTEST_ADDOPTS=--co' >> ~/.profile"
        ),
        "sitecustomize_package": f"mkdir {_SITE}/sitecustomize; echo '{_END}' > {_SITE}/sitecustomize/__init__.py",
        "usercustomize_package": f"mkdir {_SITE}/usercustomize; echo '{_END}' > {_SITE}/usercustomize/__init__.py",
        "user_site_package": (
            "mkdir -p ~/.local/lib/python3.11/site-packages/usercustomize; "
            f"echo '{_END}' > ~/.local/lib/python3.11/site-packages/usercustomize/__init__.py"
        ),
        "pytest11_dist_info": (
            f"mkdir {_SITE}/evil-1.0.dist-info; echo '{_END}' > {_SITE}/evil.py; "
            f"printf '[pytest11]\\nevil = evil\\n' > {_SITE}/evil-1.0.dist-info/entry_points.txt; "
            f"printf 'Metadata-Version: 2.1\\nName: evil\\nVersion: 1\\n' > {_SITE}/evil-1.0.dist-info/METADATA; "
            f"printf 'evil.py,,\\nevil-1.0.dist-info/entry_points.txt,,\\n' > {_SITE}/evil-1.0.dist-info/RECORD"
        ),
        "pygments_patched": f"echo '{_END}' > {_SITE}/pygments/__init__.py",
        "packaging_patched_bytecode": (
            f"rm -rf {_SITE}/packaging; mkdir {_SITE}/packaging; echo '{_END}' > {_SITE}/packaging/__init__.py"
        ),
        "pth_beyond_1mb": f"python3 -c 'print(\"# x\\n\" * 400000)' > {_SITE}/a.pth; echo '{_END}' >> {_SITE}/a.pth",
        "pth_to_a_zip": (
            f" echo '{_END}' > sitecustomize.py; python3 -m zipfile -c e.zip sitecustomize.py; echo ./e.zip > {_SITE}/b.pth"
        ),
        "python_zip": (
            f"cd /tmp; echo '{_END}' > sitecustomize.py; "
            'python3 -c \'import sys, zipfile; zipfile.ZipFile(sys.path[1], "w").write("sitecustomize.py")\''
        ),
        "bytecode_of_the_library": (
            f"python3 -c 'import ast' ; echo '{_END}' > /tmp/ast.py; "
            f'python3 -c \'import py_compile; py_compile.compile("/tmp/ast.py", cfile="/tmp/ast.pyc", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\'; '
            f"mkdir -p {_LIBRARY}/__pycache__; cp /tmp/ast.pyc {_LIBRARY}/__pycache__/ast.cpython-311.pyc"
        ),
        "path_of_the_interpreter": (
            "replaced-tool",
            f"mkdir /tmp/e; echo '{_END}' > /tmp/e/pytest.py; echo '{_END}' > /tmp/e/encodings.py; "
            "for p in python3 python3.11; do echo /tmp/e > /usr/bin/$p._pth; done",
        ),
        "environment_of_the_interpreter": (
            "replaced-tool",
            f"mkdir -p /usr/e/lib/python3.11; echo '{_END}' > /usr/e/lib/python3.11/os.py; "
            "echo home = /usr/e/bin > /usr/pyvenv.cfg; cp /usr/pyvenv.cfg /usr/bin",
        ),
        "plugin_in_capitals": (
            f"mkdir {_SITE}/evil-1.0.DIST-INFO; echo '{_END}' > {_SITE}/evil.py; "
            f"printf '[pytest11]\\nevil = evil\\n' > {_SITE}/evil-1.0.DIST-INFO/entry_points.txt; "
            f"printf 'Name: evil\\nVersion: 1\\n' > {_SITE}/evil-1.0.DIST-INFO/METADATA; echo evil.py,, > {_SITE}/evil-1.0.DIST-INFO/RECORD"
        ),
        "plugin_on_a_path": (
            f"mkdir -p /srv/e/evil-1.0.dist-info; echo '{_END}' > /srv/e/evil.py; echo /srv/e > {_SITE}/e.pth; "
            "printf '[pytest11]\\nevil = evil\\n' > /srv/e/evil-1.0.dist-info/entry_points.txt; "
            "printf 'Name: evil\\nVersion: 1\\n' > /srv/e/evil-1.0.dist-info/METADATA"
        ),
    },
)
"""Commands of bash by name, each with its class."""

IN_WORKING_DIRECTORY: dict[str, tuple[str, str]] = of_class(
    "quiet-runner",
    {
        "cwd_stdlib": f"echo '{_END}' > ./ast.py",
        "cwd_json": f"mkdir ./json; echo '{_END}' > ./json/__init__.py",
        "cwd_plugin": (
            f"echo '{_END}' > ./evil.py; mkdir ./evil-1.dist-info; "
            "printf '[pytest11]\\nevil = evil\\n' > ./evil-1.dist-info/entry_points.txt; printf 'Name: evil\\n' > ./evil-1.dist-info/METADATA"
        ),
    },
)
"""The same, by files of the working directory, in which many tests run."""


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
    paths = {path for text in texts for path in _PATH.findall(text) if not path.startswith(_OURS)}
    return sorted(paths)[:_MOST_PATHS]


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

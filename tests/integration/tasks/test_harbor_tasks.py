"""Harbor tasks in real sandboxes: files, hooks and options have the effect that they have with Harbor."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farm.errors import FarmError
from farm.tasks.harbor_folder import task_folder
from tests.integration.tasks.harbor_hacks import HACKS as ALL
from tests.integration.tasks.harbor_hacks import write_task
from workers.cli.task_checks import CheckOptions, solve

SAMPLES = Path(__file__).parents[3] / "examples" / "tasks" / "harbor"
OPTIONS = CheckOptions(sandbox="namespace", n_parallel=4)


def test_batch_option_runs_tests_as_harbor_does(place: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, verification="as_authors")
    test, attempt = ALL["pygments_patched"]
    with task_folder(write_task(tmp_path / "task", test, attempt)) as task:
        assert asyncio.run(solve(task, options)).score.value == 1.0


def test_harborignore_excludes_files_from_sandboxes(place: Path, tmp_path: Path) -> None:
    test = "test ! -e /tests/expected.txt && test ! -e /tests/.harborignore && test -e /tests/helper.sh"
    test = f"#!/bin/bash\n{test} && cat /app/answer.txt > /logs/verifier/reward.txt"
    solution = "ls /solution | grep -cx -e solve.sh -e work.txt -e notes.md > /app/answer.txt"
    folder = write_task(tmp_path / "task", test, solution)
    folder.joinpath("tests/.harborignore").write_text("*.txt\n")
    folder.joinpath("solution/notes.md").touch()
    folder.joinpath("solution/.harborignore").write_text("*.md\n")
    with task_folder(folder) as task:
        assert asyncio.run(solve(task, OPTIONS)).score.value == 1.0
    folder.joinpath("solution/.harborignore").write_text("solve.sh\n")
    with task_folder(folder) as task, pytest.raises(FarmError, match=r"solution/solve\.sh: a \.harborignore"):
        asyncio.run(solve(task, OPTIONS))


def test_collect_hooks_run_as_their_user_or_the_user_of_the_image(place: Path, tmp_path: Path) -> None:
    tables = '[agent]\nuser = 1500\n[verifier]\nenvironment_mode = "separate"\n'
    for user in ("", "user = 1600", 'user = "nobody-at-all"', 'user = "app"'):
        hook = "{ id -u; stat -c %u /app/answer.txt; echo $HOME; } >> /logs/artifacts/users; exit 1"
        tables += f"[[verifier.collect]]\ncommand = '{hook}'\n{user}\n"
    test = """#!/bin/bash
said=$(echo $(cat /logs/artifacts/users))
echo "$said"
[ "$said" = "0 1500 /root 1600 1500 / 1700 1500 /srv/app" ]; echo $((1 - $?)) > /logs/verifier/reward.txt
"""
    folder = write_task(tmp_path / "task", test, "echo 42 > /app/answer.txt", tables)
    with folder.joinpath("environment/Dockerfile").open("a") as dockerfile:
        dockerfile.write("RUN echo app:x:1700:1700::/srv/app:/bin/sh >> /etc/passwd\n")
    with task_folder(folder) as task:
        score = asyncio.run(solve(task, OPTIONS)).score
    assert score.value == 1.0, score.details


def test_example_of_the_page_runs_unchanged(place: Path, tmp_path: Path) -> None:
    page = (SAMPLES.parents[2] / "docs" / "how-to" / "users" / "tasks" / "harbor.md").read_text()
    block = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "FARM_SANDBOX": "namespace"}
    done = subprocess.run(["bash", "-ec", block], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr.splitlines()) == (0, ["sound  hello"]), done.stdout

"""Harbor tasks in real sandboxes: solutions score 1, an untouched sandbox 0, and no attempt more than its work.

`make test` runs some attempts of each kind, `make soak` all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from farm.errors import FarmError
from farm.tasks.harbor_folder import task_folder, task_paths
from tests.conftest import absent
from tests.integration.tasks.harbor_hacks import HACKS as ALL
from tests.integration.tasks.harbor_hacks import HONEST, PYTEST_TEST, SHELL_TEST, WORK, write_task
from tests.integration.tasks.task_scores import task_scores, values
from tests.services.soak import ONLY, at_length
from workers.cli.task_checks import CheckOptions, checked, solve
from workers.plugins.registry import sandbox as provider

SAMPLES = Path(__file__).parents[3] / "examples" / "tasks" / "harbor"
NAMES = ("count-words", "farm/fix-duration-parser", "farm/separate-verifier", "farm/stages-and-users", "farm/two-steps")
OPTIONS = CheckOptions(sandbox="namespace", n_parallel=4)
FEW = (
    # own rewards, own tests
    *("exit_code", "early_both_read_only", "linked_verifier", "pipe_as_text", "own_helper"),
    # programs that run during the tests, or replace programs that they need
    *("waiting_process", "replaced_folder", "start_up_files", "patched_runner", "shadowed_interpreter"),
    *("link_into_tests", "pygments_patched", "pytest11_dist_info", "cwd_stdlib"),
)
HACKS = at_length({name: ALL[name] for name in FEW}, ALL)


@pytest.mark.parametrize("kind", ["namespace", pytest.param("singularity", marks=ONLY)])
def test_sample_solutions_score_one_and_untouched_sandboxes_zero(place: Path, kind: str) -> None:
    if missing := provider(kind).missing():
        absent(missing)
    options = dataclasses.replace(OPTIONS, sandbox=kind)
    results = asyncio.run(checked(task_paths(SAMPLES), options, lambda each: None))
    found = sorted((each.name, each.solved, each.untouched, each.problem) for each in results)
    assert found == [(name, 1.0, 0.0, "") for name in NAMES]


@pytest.fixture(scope="module")
def scores(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float | BaseException]:
    """Return the score of each attempt, several at a time, and of the work itself."""
    chosen = {**HACKS, **HONEST, "work_in_shell": (SHELL_TEST, WORK), "work_in_pytest": (PYTEST_TEST, WORK)}
    return values(task_scores(tmp_path_factory.mktemp("hacks"), chosen, OPTIONS))


@pytest.mark.soak
@pytest.mark.parametrize("name", HACKS)
def test_attack_scores_zero(scores: Mapping[str, float | BaseException], name: str) -> None:
    assert scores[name] == 0.0


@pytest.mark.parametrize("name", ["work_in_shell", "work_in_pytest", *HONEST])
def test_real_work_scores_one(scores: Mapping[str, float | BaseException], name: str) -> None:
    assert scores[name] == 1.0


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

"""Scores of leftovers of a policy in a sandbox of a Harbor task: however strange they are, they are never an error.

Some are worth 0, as the tests cannot decide otherwise. The others leave the answer where the tests find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from farm.errors import EvaluatorError
from farm.tasks.harbor_folder import task_folder
from tests.integration.tasks.harbor_hacks import SHELL_TEST, WORK, write_task
from tests.integration.tasks.task_scores import task_scores, values
from workers.cli.task_checks import CheckOptions, solve

OPTIONS = CheckOptions(sandbox="namespace", n_parallel=2)
QUICK = "[verifier]\ntimeout_sec = 6.0\n"
SEPARATE = f'artifacts = ["/app"]\n{QUICK}environment_mode = "separate"\n'
STEPS = f"""multi_step_reward_strategy = "mean"
{QUICK}[[steps]]
name = "one"
[[steps]]
name = "two"
"""


def nested(name: str) -> str:
    """Return a command that makes 1,500 nested folders of this name."""
    return f'python3 -c \'import os\nfor n in range(1500): os.mkdir("{name}"); os.chdir("{name}")\''


SPARSE = """python3 -c 'for n in range(40): open(f"/app/large{n}", "w").truncate(10**9)'"""
SHARED = {
    "pipe": ("mkfifo /app/answer.txt", 0.0),
    "endless": ("ln -s /dev/zero /app/answer.txt", 0.0),
    "beyond_path_max": (f"{WORK}; cd /app; {nested('dddd')}", 1.0),
    "deep": (f"{WORK}; cd /usr/local; {nested('d')}", 1.0),
    "deep_logs": (f"{WORK}; cd /logs; {nested('dddd')}", 1.0),
    "file_for_a_mount_point": (f"{WORK}; rm -rf /var; echo x > /var", 1.0),
    "link_for_a_mount_point": (f"{WORK}; rm -rf /var; ln -s /var /var", 1.0),
    "file_for_the_temporary_folder": (f"{WORK}; rm -rf /tmp; echo x > /tmp", 1.0),
    "root_folder_closed": (f"{WORK}; chmod 000 /", 1.0),
    "tests_folder_as_a_pipe": (f"{WORK}; rm -rf /tests; mkfifo /tests", 1.0),
    "no_users": (f"{WORK}; rm /etc/passwd /etc/group", 1.0),
    "names": (f"{WORK}; cd /app; touch $'a\\nb' $'\\xff' $(printf 'n%.0s' $(seq 255)); ln answer.txt /etc/other", 1.0),
    "no_shell": (f"{WORK}; rm -f /bin/bash /usr/bin/bash", 1.0),
    "unwritable_reward": (f"{WORK}; mkdir -p /logs/verifier/reward.txt/x; chmod 000 /logs", 1.0),
    "no_reward": ("printf 'exit 0' > /app/leave", 0.0),
}
ONLY_SEPARATE = {"deep": (f"{WORK}; cd /app; {nested('d')}", 0.0), "work": (WORK, 1.0)}
LEAVING = SHELL_TEST.replace(". /tests/helper.sh", ". /tests/helper.sh; . /app/leave")
"""A test that runs code of the policy, which may end it without a reward; without that code it still runs."""


@pytest.fixture(scope="module")
def scores(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float | BaseException]:
    tasks = {f"shared_{name}": (LEAVING, command, QUICK) for name, (command, _) in SHARED.items()}
    tasks |= {f"separate_{name}": (SHELL_TEST, command, SEPARATE) for name, (command, _) in ONLY_SEPARATE.items()}
    tasks["hanging"] = ("#!/bin/bash\nsleep 60\n", WORK, QUICK)
    return values(task_scores(tmp_path_factory.mktemp("leftovers"), tasks, OPTIONS))


@pytest.mark.parametrize("name", SHARED)
def test_leftovers_for_a_shared_verifier_get_a_score(scores: Mapping[str, object], name: str) -> None:
    assert scores[f"shared_{name}"] == SHARED[name][1]


@pytest.mark.parametrize("name", ONLY_SEPARATE)
def test_leftovers_for_a_separate_verifier_get_a_score(scores: Mapping[str, object], name: str) -> None:
    assert scores[f"separate_{name}"] == ONLY_SEPARATE[name][1]


def test_tests_that_also_hang_in_a_clean_image_are_an_error(scores: Mapping[str, object]) -> None:
    found = scores["hanging"]
    assert isinstance(found, EvaluatorError)
    assert "its tests took longer than 6 s" in str(found)


def test_step_with_too_large_leftovers_ends_the_task_with_zero(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "steps", SHELL_TEST, f"{WORK}; {SPARSE}", STEPS)
    for name in ("one", "two"):
        step = folder / "steps" / name
        step.mkdir(parents=True)
        (step / "instruction.md").write_text("Write the answer to /app/answer.txt.\n")
        (folder / "solution").rename(step / "solution") if name == "one" else (step / "solution").mkdir()
    (folder / "steps/two/solution/solve.sh").write_text(f"#!/bin/bash\n{WORK}\n")
    with task_folder(folder) as task:
        assert asyncio.run(solve(task, OPTIONS)).score.value == 0.0

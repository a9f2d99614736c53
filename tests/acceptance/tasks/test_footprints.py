"""The footprint of a task's solution: kept by `farm tasks check`, submitted with the task, and hidden from policies."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from farm.settings import settings
from farm.tasks.harbor_folder import TaskFolder, task_folder
from farm.tasks.known_tasks import TaskEvidence, evidence_of
from tests.integration.tasks.harbor_hacks import write_task
from workers.cli.local_rollout import local_archive
from workers.cli.task_checks import CheckOptions, TaskCheck, checked, solve

OPTIONS = CheckOptions(sandbox="namespace")
_REWARD = "> /logs/verifier/reward.txt"
TEST = f"""#!/bin/bash
if [ "$(tac < /dev/null)" = mended ] && grep -qx 42 /app/answer.txt; then echo 1; else echo 0; fi {_REWARD}
"""
"""A task about a program of the image, which its guard would restore."""
PROGRAM = "printf '#!/bin/sh\\necho mended\\n' > /usr/bin/tac && chmod 755 /usr/bin/tac"
WORK = "echo 42 > /app/answer.txt"
FORGED = "printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/grep && chmod 755 /usr/bin/grep"
MODULES = "/usr/lib/python3/dist-packages/farm_footprint"
MANY_TEST = f"""#!/bin/bash
modules=({MODULES}/*.py)
if [ ${{#modules[@]}} = 70 ]; then echo 1; else echo 0; fi {_REWARD}
"""
MANY = f"mkdir -p {MODULES} && for i in {{1..70}}; do echo x > {MODULES}/m$i.py; done"


def check(folder: Path) -> TaskCheck:
    (result,) = asyncio.run(checked([folder], OPTIONS, lambda each: None))
    return result


ENTERED = f"""#!/bin/bash
cd data
if python3 -c 'import statistics
print(statistics.mean(int(text) for text in open("/app/answer.txt")))' | grep -qx 42
then echo 1; else echo 0; fi {_REWARD}
"""
"""A task whose tests enter a folder that they do not name, and use modules of the standard library there."""
SHADOWING = "mkdir -p /app/data; echo 0 > /app/answer.txt; echo 'mean = lambda numbers: 42' > /app/data/statistics.py"
HELPED = f"""#!/bin/bash
cd /app/data
if python3 -c 'import own; print(own.VALUE)' | grep -qx 42; then echo 1; else echo 0; fi {_REWARD}
"""
"""A task whose tests import the policy's code."""


def score(folder: Path) -> float:
    with task_folder(folder) as task:
        return asyncio.run(solve(task, OPTIONS)).score.value


def fields_of(task: TaskFolder) -> dict[str, Any]:
    """Return the fields of a task, with its stored evidence."""
    archive = local_archive(task.path)
    fields: dict[str, Any] = task.request(archive, evidence_of(settings().home, archive))["fields"]
    return fields


def footprint(folder: Path) -> object:
    with task_folder(folder) as task:
        return fields_of(task).get("footprint")


def test_paths_changed_by_the_solution_are_stored_and_allowed_to_policies(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", TEST, f"{PROGRAM} && {WORK}")
    assert score(folder) == 0.0
    assert footprint(folder) is None
    assert check(folder) == TaskCheck("task", 1.0, 0.0, evidence=TaskEvidence(("/usr/bin/tac",)))
    assert footprint(folder) == ["/usr/bin/tac"]
    assert score(folder) == 1.0
    # a changed task is a new one
    (folder / "tests" / "expected.txt").write_text("43\n")
    assert footprint(folder) is None
    assert score(folder) == 0.0


@pytest.mark.parametrize(
    "attempt",
    [f"{PROGRAM} && {FORGED}", f"ln -s /tests/expected.txt /app/answer.txt; {PROGRAM}", f"{FORGED}; {WORK}"],
    ids=["another_program", "link", "without_the_work"],
)
def test_changes_outside_the_footprint_score_zero(place: Path, tmp_path: Path, attempt: str) -> None:
    """By the footprint of the solution, which is not the script that is scored."""
    folder = write_task(tmp_path / "task", TEST, attempt)
    with task_folder(folder) as task:
        instance = task.instance.model_copy(update={"footprint": ("/usr/bin/tac",)})
        attempted = dataclasses.replace(task, instance=instance)
        assert asyncio.run(solve(attempted, OPTIONS)).score.value == 0.0


def test_many_paths_are_stored_as_their_folder(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", MANY_TEST, MANY)
    result = check(folder)
    assert (result.sound, result.evidence.footprint) == (True, (f"{MODULES}/",))


def test_solution_that_changes_most_of_the_image_has_no_footprint(place: Path, tmp_path: Path) -> None:
    """Its check reports the rule by which it scores."""
    places = " ".join(f"/usr/lib/farm{number}/dist-packages" for number in range(70))
    test = f"#!/bin/bash\nn=$(cat /usr/lib/farm*/dist-packages/ast.py | wc -l)\necho $((n == 70)) {_REWARD}\n"
    folder = write_task(tmp_path / "task", test, f"mkdir -p {places}; for p in {places}; do echo x > $p/ast.py; done")
    result = check(folder)
    assert (result.solved, result.evidence.footprint) == (0.0, ())
    assert "with `verification=as_authors` it scores 1, as it changes /usr/lib/" in result.problem


def test_tests_that_pass_with_safe_path_run_with_it(place: Path, tmp_path: Path) -> None:
    """Without a check's evidence the policy's module is found there; see docs/how-to/users/tasks/harbor.md."""
    folder = write_task(tmp_path / "task", ENTERED, f"mkdir -p /app/data; {WORK}")
    assert check(folder).evidence == TaskEvidence(safe_path=True)
    with task_folder(folder) as task:
        assert fields_of(task)["safe_path"] is True
    forged = write_task(tmp_path / "forged", ENTERED, SHADOWING)
    assert score(forged) == 1.0
    with task_folder(forged) as task:
        strict = dataclasses.replace(task, instance=task.instance.model_copy(update={"safe_path": True}))
        assert asyncio.run(solve(strict, OPTIONS)).score.value == 0.0


def test_tests_that_import_from_their_folder_run_without_safe_path(place: Path, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", HELPED, "mkdir -p /app/data; echo VALUE=42 > /app/data/own.py")
    assert check(folder) == TaskCheck("task", 1.0, 0.0)
    assert score(folder) == 1.0
    with task_folder(folder) as task:
        assert evidence_of(settings().home, local_archive(task.path)) == TaskEvidence()

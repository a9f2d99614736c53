"""Harbor tasks in real sandboxes: solutions score 1, an untouched sandbox 0, and no attempt more than its work.

`make test LONG=1` runs some attempts of each kind, `make soak` all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from farm.tasks.harbor_folder import task_paths
from tests.conftest import absent
from tests.integration.tasks.harbor_hacks import HACKS as ALL
from tests.integration.tasks.harbor_hacks import HONEST, PYTEST_TEST, SHELL_TEST, WORK
from tests.integration.tasks.task_scores import task_scores, values
from tests.services.soak import ONLY, at_length
from workers.cli.task_checks import CheckOptions, checked
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

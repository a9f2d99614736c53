"""Right work in unusual forms scores 1 with a shared and with a separate verifier.

`make test LONG=1` runs every sixth, `make soak` all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.acceptance.tasks.honest_work import OTHERS, TOO_LARGE, WAYS
from tests.integration.tasks.harbor_hacks import SHELL_TEST
from tests.integration.tasks.task_scores import task_scores, values
from tests.services.soak import at_length
from workers.cli.task_checks import CheckOptions

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]
OPTIONS = CheckOptions(sandbox="namespace", n_parallel=2)
SHARED = "[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n"
SEPARATE = f'artifacts = ["/app"]\n{SHARED}'.replace("[agent]", 'environment_mode = "separate"\n[agent]')
WORKS = {
    **{f"shared {name}": (SHELL_TEST, command, SHARED) for name, command in WAYS.items()},
    **{f"separate {name}": (SHELL_TEST, WAYS[name], SEPARATE) for name in WAYS if name not in TOO_LARGE},
    **{f"shared {name}": (test, command, SHARED) for name, (test, command) in OTHERS.items()},
}
CHOSEN = at_length({name: WORKS[name] for name in [*WORKS][::6]}, WORKS)
N_HONEST = 40


@pytest.fixture(scope="module")
def scores(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float | BaseException]:
    return values(task_scores(tmp_path_factory.mktemp("honest"), CHOSEN, OPTIONS))


@pytest.mark.parametrize("name", CHOSEN)
def test_right_work_scores_one(scores: Mapping[str, float | BaseException], name: str) -> None:
    assert scores[name] == 1.0


def test_there_are_enough_honest_cases() -> None:
    assert len(WAYS) - len(TOO_LARGE) >= N_HONEST

"""Right work of unusual form is scored 1 by a shared and by a separate verifier.

Every sixth runs in `make test`, all of them in `make soak`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from farm.tasks.harbor_folder import task_folder
from tests.integration.tasks.harbor_hacks import SHELL_TEST, write_task
from tests.integration.tasks.honest_work import OTHERS, TOO_LARGE, WAYS
from tests.services.soak import at_length
from workers.cli.task_checks import CheckOptions, solve

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
    top = tmp_path_factory.mktemp("honest")
    room = asyncio.Semaphore(OPTIONS.n_parallel)

    async def score(name: str) -> float:
        async with room:
            with task_folder(write_task(top / name.replace(" ", "-"), *CHOSEN[name])) as task:
                return (await solve(task, OPTIONS)).score.value

    async def all_scores() -> list[float | BaseException]:
        return await asyncio.gather(*map(score, CHOSEN), return_exceptions=True)

    return dict(zip(CHOSEN, asyncio.run(all_scores()), strict=True))


@pytest.mark.parametrize("name", CHOSEN)
def test_right_work_is_scored_one(scores: Mapping[str, float | BaseException], name: str) -> None:
    assert scores[name] == 1.0


def test_there_are_enough() -> None:
    assert len(WAYS) - len(TOO_LARGE) >= N_HONEST

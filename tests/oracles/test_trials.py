"""Rewards of Harbor's own trials in the farm's sandboxes equal those of the farm: of the solution, and of no agent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from farm.tasks.harbor_folder import TaskFolder, task_folder
from tests.conftest import absent
from tests.integration.tasks.task_scores import farm_with_bases
from tests.oracles.comparisons import PROGRAMS, ROOT, SAMPLES
from tests.oracles.farm_readings import VARIABLES
from tests.oracles.trial_tasks import written
from workers.cli.local_rollout import repeated
from workers.cli.task_checks import CheckOptions, score_of, solve
from workers.plugins.interfaces import Score

OPTIONS = CheckOptions(sandbox="namespace", verification="as_authors", secrets=VARIABLES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The folders of all tasks by name, in a farm that has their base images."""
    with farm_with_bases(tmp_path_factory.mktemp("base")):
        samples = {f"sample {path.name}": path for path in sorted(SAMPLES[0].iterdir()) if path.is_dir()}
        yield {**samples, **written(tmp_path_factory.mktemp("tasks"))}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> Any:
    """The rewards of Harbor's trials, by task and agent."""
    python = Path(os.environ["FARM_TEST_ORACLES"]) / "harbor" / ".venv" / "bin" / "python"
    if not python.exists():
        absent("harbor is not installed: tests/oracles/environment.sh says why")
    bridge = [[sys.executable, "-m", "tests.oracles.sandbox_bridge"], str(ROOT)]
    env = os.environ | VARIABLES | {"FARM_ORACLE_BRIDGE": json.dumps(bridge)}
    text = json.dumps({name: str(path) for name, path in folders.items()})
    command = [python, PROGRAMS / "harbor_trials.py"]
    done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    sys.stderr.write(done.stderr[-20_000:])
    return json.loads(done.stdout.splitlines()[-1])


def test_rewards_equal_those_of_harbors_trials(folders: dict[str, Path], theirs: Any) -> None:
    async def solution(task: TaskFolder) -> Score:
        return (await repeated(partial(solve, task, OPTIONS))).score

    async def untouched(task: TaskFolder) -> Score:
        return await repeated(partial(score_of, task, OPTIONS))

    found: dict[str, dict[str, Any]] = {}
    for name, path in folders.items():
        with task_folder(path) as task:
            found[name] = {"oracle": _rewards(solution(task)), "nop": _rewards(untouched(task))}
    # a task that is rewarded only by a file is worth 0 without it, as its solution has a reward; Harbor has no result
    of_work_alone = "a reward for work alone"
    assert (found[of_work_alone].pop("nop"), theirs[of_work_alone].pop("nop")) == ({"reward": 0.0}, None)
    assert found == theirs


def _rewards(scoring: Coroutine[Any, Any, Score]) -> dict[str, float] | None:
    """Return rewards by name; None if tests give none in the clean image either."""
    try:
        return dict(asyncio.run(scoring).rewards)
    except EvaluatorError:
        return None

"""The trainers' own packages for the tests in this folder: `make test-trainers`. Without FARM_TRAINERS_PYTHON none of
them is collected.

Code that imports a trainer runs in the trainers' Python, as a program of `programs/`, and calls a real farm over HTTP.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import farm
from farm.client.local import LocalFarm
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.api import KEY, served
from tests.services.farms import embedded, farm_folder, until
from workers.testing.engine.model_text import write_model_text
from workers.testing.engine.simulated_values import ExpertRouting
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
QUESTION = "How many hops?"
N_PROMISES = 8
"""The number of promises of an adapter that returns results."""
SCRIPT = Script(
    [
        ScriptedProblem(
            match=QUESTION,
            branches=(
                Branch(name="right", turns=(ScriptedTurn(content="three"),)),
                Branch(name="wrong", turns=(ScriptedTurn(content="four"),)),
            ),
        )
    ]
)
EXPERTS = ExpertRouting(n_layers=2, top_k=4, n_experts=300)
VERIFIERS = ("0.4.0", "a60a606")
"""The versions of verifiers: the installed one, and that of prime-rl's newest public snapshot."""
Program: TypeAlias = Callable[..., Any]

if not os.environ.get("FARM_TRAINERS_PYTHON"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def trainers() -> Path:
    """The folder of the trainers' environment and sources."""
    return Path(os.environ["FARM_TRAINERS_PYTHON"]).parents[2]


@pytest.fixture(scope="session")
def client() -> Iterator[LocalFarm]:
    """A farm with a scripted engine, which accepts pauses and weight versions like vLLM."""
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT, weight_version="0", experts=EXPERTS).app()) as policy,
        embedded(folder, FARM_POLICY_URL=f"{policy}/v1") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as connected,
    ):
        assert isinstance(connected, LocalFarm)
        until(lambda: connected.engines()[0].engine.info is not None, "the engine was asked what it can do")
        yield connected


@pytest.fixture(scope="session")
def farm_url(client: LocalFarm) -> Iterator[str]:
    with served(client) as url:
        yield url


@pytest.fixture(scope="session")
def model_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of the scripted engine."""
    folder = tmp_path_factory.mktemp("model")
    write_model_text(folder)
    return folder


def verifiers_of(trainers: Path, version: str) -> str | None:
    """Return the folders of a version of verifiers, to run a program with; None is the installed one."""
    if version == VERIFIERS[0]:
        return None
    source, mcp = trainers / f"verifiers-{version}", trainers / "mcp-1"
    for folder, module in ((source, "verifiers"), (mcp, "mcp")):
        if not (folder / module).exists():
            absent(f"{module} is not in {folder}: tests/trainers/environment.sh could not fetch it")
    return os.pathsep.join(map(str, (source, mcp)))


def are_of(experts: Any, ids: list[int]) -> bool:
    """Return True if these are the experts of all ids but the last, with the weights of some step."""
    given = np.array(experts)
    versions = map(str, range(10))
    return any(np.array_equal(given, EXPERTS.of(np.array(ids), version)[:-1]) for version in versions)


@pytest.fixture
def run(farm_url: str, tmp_path: Path) -> Program:
    """Runs a program in the trainers' Python, with the farm's address; returns its last line of output, as JSON.

    For an example, its whole output. `url` is the address of another farm, `release` the folder of another release, or
    several as in PYTHONPATH.
    """

    def run_program(
        name: str, *words: object, path: Path | None = None, url: str = farm_url, release: Path | str | None = None
    ) -> Any:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT, path, release) if each),
            "FARM_API_KEY": KEY,
            "FARM_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
        }
        program = [str(PROGRAMS / f"{name}.py"), url]
        if name.startswith("examples/"):
            program = [str(ROOT / name), "--farm", url]
        command = [os.environ["FARM_TRAINERS_PYTHON"], *program, *map(str, words)]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout if name.startswith("examples/") else json.loads(done.stdout.splitlines()[-1])

    return run_program

"""Other systems' own clients with the farm's protocols: `make test-protocols`.

Without FARM_TEST_PROTOCOLS none of them is collected. Each is a program of `programs/` in its own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from farm.embedded.embedded_farm import Embedded
from tests.conftest import absent
from tests.doubles import EngineDouble
from tests.services.api import KEY, RestartableApi, killable_api
from tests.services.farms import embedded, farm_folder, until
from tests.services.servers.broker import free_ports
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

PROGRAMS = Path(__file__).parent / "programs"
QUESTION = "How many hops?"
RIGHT = Branch(name="right", turns=(ScriptedTurn(content="three"),))
Start: TypeAlias = Callable[[str, str, dict[str, Any]], "subprocess.Popen[str]"]

if not os.environ.get("FARM_TEST_PROTOCOLS"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def double() -> EngineDouble:
    """A slow engine, so that a program can be killed meanwhile."""
    return EngineDouble(Script([ScriptedProblem(match=QUESTION, branches=(RIGHT,))]), tokens_per_s=2)


@pytest.fixture(scope="module")
def engine(double: EngineDouble) -> Iterator[str]:
    with serving(double.app()) as url:
        yield url


@pytest.fixture(scope="module")
def root_port() -> int:
    """The port whose root serves NeMo Gym's protocol."""
    [port] = free_ports(1)
    return port


@pytest.fixture(scope="module")
def here(root_port: int) -> Iterator[tuple[Embedded, RestartableApi]]:
    """A farm without its own engines, and its API."""
    speak = f"agent-lightning,nemo-gym={root_port},swe-rex,e2b"
    with (
        farm_folder() as folder,
        embedded(folder) as started,
        killable_api(started.home, folder / "api.log", KEY, "--speak", speak) as api,
    ):
        until(api.listens, "the API listens")
        yield started, api


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program in the environment of a system, with its settings; programs that still run are ended."""
    running: list[subprocess.Popen[str]] = []

    def begin(system: str, program: str, given: dict[str, Any]) -> subprocess.Popen[str]:
        python = Path(os.environ["FARM_TEST_PROTOCOLS"]) / system / ".venv" / "bin" / "python"
        if not python.exists():
            absent(f"{system} is not installed: tests/protocols/environment.sh says why")
        command = [str(python), str(PROGRAMS / f"{program}.py"), json.dumps(given)]
        output = (tmp_path / f"{program}.err").open("a")
        running.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=output, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait(30)


def result_of(process: subprocess.Popen[str], log: Path) -> Any:
    """Return the last line of a program's output, as JSON."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{output[-2000:]}\n{log.read_text()[-4000:]}"
    return json.loads(output.splitlines()[-1])

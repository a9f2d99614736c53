"""All that a training run stands on: a farm on this machine with the example's handler, its API, and an engine.

Each is a child of this process and ends with it, however that ends. What was played stays in the farm's home.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import farm
from examples.training.vllm_server import await_answer
from farm.embedded.child_process import ChildProcess
from farm.embedded.embedded_farm import Embedded
from farm.settings import Settings

ROOT = Path(__file__).parents[2]
HANDLER = Path(__file__).with_name("follow_files")
_START_S = 120.0
_ENGINE_S = 120.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class TrainingFarm:
    """A running farm: its home, which `farm.connect` takes on this machine, and the URL of its API for a trainer."""

    home: Path
    api_url: str
    embedded: Embedded

    @property
    def client_variables(self) -> dict[str, str]:
        """The environment of a trainer, which finds the farm's key there."""
        return trainer_variables() | {"FARM_HOME": str(self.home)}


def trainer_variables() -> dict[str, str]:
    """Return the environment of a process in the trainer's Python: it finds the farm's package there."""
    # threads that wait for each other stand still where other processes share the cores
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    quiet["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return os.environ | quiet | {"PYTHONPATH": str(ROOT)}


def cloned_policy(python: Path, folder: Path, *options: object) -> Path:
    """Return the folder of the policy to begin with; it is cloned, with these options, unless it is there."""
    if not folder.exists():
        command = [str(python), "-m", "examples.training.behaviour_cloning", str(folder), *map(str, options)]
        subprocess.run(command, env=trainer_variables(), check=True)
    return folder


@contextmanager
def training_farm(settings: Settings, engine_url: str, node_options: Sequence[str] = ()) -> Iterator[TrainingFarm]:
    """Run a farm whose only engine is this vLLM until the block ends. It plays once the block begins."""
    site = install(HANDLER, settings.home.absolute() / "plugins")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "FARM_POLICY_URL": ""}
    with (
        Embedded(settings, node_options=node_options, flower=False, env=variables) as embedded,
        _api(embedded, variables) as url,
    ):
        _use_engine(embedded, f"{engine_url}/v1")
        yield TrainingFarm(embedded.home, url, embedded)


def install(package: Path, site: Path) -> Path:
    """Install a plug-in package into a folder, to be put on PYTHONPATH; it is found there by its entry points."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--upgrade", "--target", str(site), str(package)], check=True)
    return site


@contextmanager
def _api(embedded: Embedded, variables: Mapping[str, str]) -> Iterator[str]:
    log = embedded.logs / "api.log"
    log.unlink(missing_ok=True)
    env = os.environ | variables | {"FARM_HOME": str(embedded.home), "PYTHONUNBUFFERED": "1"}
    program = Path(sys.executable).with_name("farm")
    child = ChildProcess([str(program), "api", "--port", "0", "--url", str(embedded.home)], log=log, env=env)
    try:
        yield await_answer(child, log, lambda: _printed_url(log), _START_S)
    finally:
        child.terminate()
        child.end(_STOP_S)


def _printed_url(log: Path) -> str:
    lines = log.read_text().splitlines() if log.exists() else []
    return next((line.strip() for line in lines if line.startswith("http://")), "")


def _use_engine(embedded: Embedded, url: str) -> None:
    """Let the farm use this engine and no other, and wait until it knows what the engine can do."""
    with farm.connect(embedded.home) as client:
        # in this order it is known to lack the weights of a run that goes on, and plays nothing until it has them
        client.add_engine(url)
        for each in client.engines():
            if each.engine.url != url:
                client.remove_engine(each.engine.url)
        deadline = time.monotonic() + _ENGINE_S
        while not any(each.engine.info for each in client.engines()):
            embedded.check()
            if time.monotonic() > deadline:
                raise farm.ServiceError(f"the farm did not find out in {_ENGINE_S:g} s what the engine at {url} can do")
            time.sleep(0.1)

"""The environment of a training run: a farm on this machine with the example's handler, its API, and an engine.

All are children of this process and end with it, however that ends. The rollouts stay in the farm's home.
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
    """A running farm: its home, for `farm.connect` on this machine, and the URL of its API for a trainer."""

    home: Path
    api_url: str
    embedded: Embedded

    @property
    def client_variables(self) -> dict[str, str]:
        """The environment variables of a trainer, with the farm's key."""
        return trainer_variables() | {"FARM_HOME": str(self.home)}


def trainer_variables() -> dict[str, str]:
    """Return the environment variables of a process in the trainer's Python, with the path of the farm's package."""
    # threads that wait for each other stall where other processes share the cores
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    quiet["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return os.environ | quiet | {"PYTHONPATH": str(ROOT)}


def cloned_policy(python: Path, folder: Path, *options: object) -> Path:
    """Return the folder of the initial policy; it is cloned, with these options, if it does not exist."""
    if not folder.exists():
        command = [str(python), "-m", "examples.training.behaviour_cloning", str(folder), *map(str, options)]
        subprocess.run(command, env=trainer_variables(), check=True)
    return folder


@contextmanager
def training_farm(settings: Settings, engine_url: str, node_options: Sequence[str] = ()) -> Iterator[TrainingFarm]:
    """Run a farm whose only engine is this vLLM until the block ends. It is ready when the block begins."""
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
    """Install a plug-in package into a folder for PYTHONPATH, where it is found by its entry points."""
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
    """Let the farm use only this engine, and wait until it knows the engine's capabilities."""
    with farm.connect(embedded.home) as client:
        # in this order the engine counts as lacking the weights of a resumed run, and gets no calls until it has them
        client.add_engine(url)
        for each in client.engines():
            if each.engine.url != url:
                client.remove_engine(each.engine.url)
        deadline = time.monotonic() + _ENGINE_S
        while not any(each.engine.info for each in client.engines()):
            embedded.check()
            if time.monotonic() > deadline:
                raise farm.ServiceError(
                    f"the farm took over {_ENGINE_S:g} s to probe the engine at {url} for its abilities"
                )
            time.sleep(0.1)

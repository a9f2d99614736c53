"""The wheel in separate environments: by itself a light client, with its extra a complete farm, both without a clone.

Nothing is downloaded: an environment links exactly those packages of this one that the wheel requires.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.services.farms import farm_folder, until

ROOT = Path(__file__).parents[2]
FARMS_OWN = ("IPython", "alembic", "celery", "flower", "kombu", "reasoning_gym", "redis", "sqlalchemy", "starlette")
CLIENT = """
import sys, farm
client = farm.connect(sys.argv[1])
batch_id = client.submit({"instances": [{"data_source": "noop", "fields": {}}], "n_samples": 2})
assert [rollout.reward for rollout in client.collect(batch_id, timeout_s=120)] == [1.0, 1.0]
assert [len(group.rollouts) for group in client.stream_groups(batch_id)] == [2]
assert client.rows(batch_id).rewards.tolist() == []
try:
    farm.connect("sqlite:///farm.db")
except farm.UsageError as error:
    print(error)
"""


class WheelEnvironment:
    """A Python environment with the wheel, and separate folders to run in."""

    def __init__(self, folder: Path, wheel: Path, extras: Sequence[str]) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", symlinks=True)
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        for link, package in sorted(_files_of(_required_packages(wheel, extras)).items()):
            (site / link).symlink_to(package)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.bin / "python")]
        done = subprocess.run(
            [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        done = subprocess.run([*pip, "check"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        (site / "noop-1.dist-info").mkdir()
        (site / "noop-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: noop\nVersion: 1\n")
        (site / "noop-1.dist-info/entry_points.txt").write_text(
            "[farm.handlers]\nnoop = workers.testing:NoopHandler\n[farm.agents]\nnoop = workers.testing:NoopAgent\n"
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "PYTHON"))}
        self.env |= {"FARM_HOME": str(folder.parent / "home"), "FARM_SCRATCH": str(folder.parent / "scratch")}
        self.empty = folder / "empty"
        self.empty.mkdir()

    def run(self, *words: str, code: int = 0) -> str:
        """Run a program of the environment; return its output."""
        done = subprocess.run(
            [self.bin / words[0], *words[1:]], env=self.env, cwd=self.empty, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def running(self, *words: str) -> Iterator[Path]:
        """Yield the log of a program that runs until the block ends."""
        log = self.folder / f"{words[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.bin / words[0], *words[1:]],
                env=self.env,
                cwd=self.empty,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            until(lambda: log.read_text() or process.poll() is not None, f"{words[1]} says something")
            yield log
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(600)
        assert process.returncode == 0, log.read_text()


def _required_packages(wheel: Path, extras: Sequence[str]) -> set[str]:
    """Return the names of all packages that the wheel requires with its extras, with their own requirements."""
    with zipfile.ZipFile(wheel) as archive:
        # a folder of plug-ins inside it has one, too
        [metadata] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        own = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])
    names: set[str] = set()
    waiting = [(text, tuple(extras)) for text in own]
    seen = set(waiting)
    while waiting:
        text, wanted = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
        ):
            continue
        names.add(canonicalize_name(requirement.name))
        further = {(each, (*requirement.extras,)) for each in distribution(requirement.name).requires or ()}
        waiting += further - seen
        seen |= further
    return names


def _files_of(names: set[str]) -> dict[str, Path]:
    """Return the files and folders of these packages at the top of site-packages here, by name."""
    found: dict[str, Path] = {}
    for name in names:
        package: Any = distribution(name)
        if package._path.suffix == ".egg-info":
            # an older pip installs compiled packages so, with a list of its source files
            tops = (package.read_text("top_level.txt") or "").split()
            found |= {path.name: path for top in tops for path in package._path.parent.glob(f"{top}*")}
            continue
        for top in {file.parts[0] for file in package.files or ()} - {"..", "bin", "__pycache__"}:
            found[top] = Path(str(package.locate_file(top)))
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def client(folder: Path, wheel: Path) -> WheelEnvironment:
    (folder / "client").mkdir()
    return WheelEnvironment(folder / "client", wheel, ())


@pytest.fixture(scope="module")
def farm_install(folder: Path, wheel: Path) -> WheelEnvironment:
    (folder / "whole").mkdir()
    return WheelEnvironment(folder / "whole", wheel, ["farm"])


USERS_PROGRAM = """
import farm
from farm import BatchRequest, BatchStatus, Instance, Rollout


def rewards(address: str) -> list[float]:
    request = BatchRequest(instances=(Instance(data_source="math", fields={"question": "1 + 1?", "answer": "2"}),))
    with farm.connect(address) as client:
        batch_id: str = client.submit(request)
        status: BatchStatus = client.watch(batch_id)
        rollouts: list[Rollout] = list(client.stream(batch_id))
    reveal_type(status.mean_reward)
    return [each.reward for each in rollouts if each.reward is not None]
"""


def test_user_program_passes_strict_mypy_against_the_wheel(client: WheelEnvironment) -> None:
    program = client.folder / "program.py"
    program.write_text(USERS_PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={client.folder / 'mypy'}"]
    mypy = [*command, "--python-executable", str(client.bin / "python"), str(program)]
    checked = subprocess.run(mypy, cwd=client.folder, env=client.env, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert 'Revealed type is "float | None"' in checked.stdout or "Union[float, None]" in checked.stdout, checked.stdout
    program.write_text(USERS_PROGRAM.replace("client.watch(batch_id)", "client.wacth(batch_id)"))
    checked = subprocess.run(mypy, cwd=client.folder, env=client.env, capture_output=True, text=True)
    assert "has no attribute" in checked.stdout, "a misspelt name is no Any"


def test_client_install_contains_no_farm_package(client: WheelEnvironment) -> None:
    code = f"from importlib.util import find_spec; import farm; print([n for n in {FARMS_OWN!r} if find_spec(n)])"
    assert client.run("python", "-c", code).strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        *("up", "node", "api", "flower", "handlers", "handlers show math", "images list", "engine --scripted"),
        *("migrate", "doctor", "doctor --sandbox namespace", "metrics", "ls"),
    ],
)
def test_command_that_needs_the_farm_extra_names_it(client: WheelEnvironment, words: str) -> None:
    output = client.run("farm", *words.split(), code=1)
    assert "pip install 'rollout-farm[farm]'" in output
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1


def test_help_works_without_the_extra(client: WheelEnvironment) -> None:
    assert "Show a batch's progress" in client.run("farm", "--help")
    assert "NODE_OPTIONS" in client.run("farm", "up", "--help")


def test_yaml_request_without_the_extra_names_it(client: WheelEnvironment) -> None:
    (client.empty / "request.yaml").write_text("n_samples: 8\n")
    assert "rollout-farm[farm]" in client.run("farm", "submit", "--request", "request.yaml", code=1)


def test_farm_from_the_wheel_serves_the_client_install(
    client: WheelEnvironment, farm_install: WheelEnvironment, folder: Path
) -> None:
    assert "is at 0" in farm_install.run("farm", "migrate", "--url", f"sqlite:///{folder}/other.db")
    for environment in (client, farm_install):
        (environment.empty / "problems.jsonl").write_text(json.dumps({"data_source": "noop", "fields": {}}) + "\n")
    with farm_install.running("farm", "up", "--no-flower", "--init", "1", "--run", "4", "--eval", "1") as up:
        until(lambda: "ready" in up.read_text(), "the farm is up")
        batch_id = farm_install.run("farm", "submit", "problems.jsonl", "-n", "2").split()[0]
        assert "2 rollouts written" in farm_install.run("farm", "collect", batch_id, "-o", "batch.jsonl")
        with farm_install.running("farm", "api", "--port", "0") as api:
            url = api.read_text().strip()
            assert "pip install 'rollout-farm[farm]'" in client.run("python", "-c", CLIENT, url)
            batch_id = client.run("farm", "submit", "problems.jsonl", "--url", url).split()[0]
            assert "1 rollouts written" in client.run("farm", "collect", batch_id, "-o", "batch.npz", "--url", url)
            assert client.run("farm", "doctor", "--batch", batch_id, "--url", url)
            assert "farm_violations" in client.run("farm", "metrics", "--url", url)
            assert "nodes" in client.run("farm", "doctor", "--url", url, code=0)
    assert {path.name for path in farm_install.empty.iterdir()} == {"problems.jsonl", "batch.jsonl"}

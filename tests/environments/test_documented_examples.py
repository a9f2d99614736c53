"""The examples in the documentation of environments, run verbatim by a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.doubles.protocols.nemo_gym_server import resource_server
from tests.services.entry_points import installed
from tests.services.environments import lend_environment
from tests.services.farms import farm_folder
from workers.environments.environment_program import environment_names, environment_program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "users" / "tasks" / "environments.md").read_text()
EXAMPLE = re.compile(r"^(farm environments check (\w+) .*?)[ ]+# rewards (\[.*?\])$", re.MULTILINE | re.DOTALL)
EXAMPLES = [match.groups() for match in EXAMPLE.finditer(PAGE)]
PROJECT = ROOT / "examples" / "environment" / "packages"


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    with farm_folder() as home, farm_in(home), installed(PROJECT, home / "site"):
        yield home


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with resource_server() as url:
        yield url


def test_each_kind_has_an_example() -> None:
    of_classes = {"openenv": "openenv_counter", "verifiers": "verifiers_sums"}
    assert {of_classes.get(name, name) for name in environment_names()} == {name for _, name, _ in EXAMPLES}


@pytest.mark.parametrize(("command", "name", "rewards"), EXAMPLES, ids=lambda text: str(text)[:60])
def test_example_gives_the_documented_rewards(
    command: str, name: str, rewards: str, folder: Path, address: str
) -> None:
    program = environment_program(name)
    lend_environment(program.spec().packages, without_dependencies=program.without_dependencies)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "site"), "COLUMNS": "200"}
    shell = ["bash", "-c", command.replace("http://127.0.0.1:8000", address)]
    done = subprocess.run(shell, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"{name}: deterministic over" in done.stdout
    assert done.stdout.rstrip().endswith(f"rewards {rewards}"), done.stdout


@pytest.mark.parametrize(("name", "game"), [("textarena", "Wordle-v0"), ("gem", "game:Hangman-v0-easy")])
def test_missing_data_of_a_word_game_is_one_clear_line(name: str, game: str) -> None:
    program = environment_program(name)
    lend_environment(program.spec().packages, without_dependencies=program.without_dependencies)
    command = [sys.executable, "-m", "workers.cli.environment_check", "check", name, "--id", game]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert f"{game} needs the data 'words' of NLTK" in line
    assert "python -m nltk.downloader -d /usr/share/nltk_data words" in line

"""Python environments for sandboxes: installed once, a failure raised in all waiters, and installed in advance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from farm.errors import SandboxError
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.services.commands import output_of
from tests.services.farms import processes_of
from tests.services.gated_package import REQUIREMENT, GatedPackage
from tests.services.preloaded import completed
from workers.cli.images import main
from workers.sandboxes.images.environments import environment
from workers.sandboxes.images.image import image
from workers.testing.plugin_path import python_path

N_WAITING = 4

pytestmark = pytest.mark.usefixtures("sandbox_settings")

PLUGIN = """
from workers.agents.harness import Harness, HarnessAgent

def custom():
    return HarnessAgent(Harness(name="custom", packages=("iniconfig==2.0.0",), command=lambda task: ["true"]))
"""


def failing(log: Path) -> tuple[str, ...]:
    """Return packages whose installation writes to a log and fails."""
    return (f"--log={log}", "missing @ file:///nonexistent/missing-1-py3-none-any.whl")


def n_tries(log: Path) -> int:
    return log.read_text().count("No such file or directory: '/nonexistent") if log.exists() else 0


def test_failed_installation_is_shared_by_all_waiting(open_folder: Path) -> None:
    config = sandbox_config()
    log = open_folder / "pip.log"
    together = Barrier(N_WAITING)

    def ask(number: int) -> str:
        together.wait()
        with pytest.raises(SandboxError) as raised:
            environment(config, failing(log), image(config, "host"))
        return str(raised.value)

    with pytest.raises(SandboxError, match="nonexistent"):
        environment(config, failing(log), image(config, "host"))
    alone = n_tries(log)
    assert alone > 0
    with ThreadPoolExecutor(N_WAITING) as pool:
        assert len(set(pool.map(ask, range(N_WAITING)))) == 1
    assert n_tries(log) == 2 * alone, "who comes later tries again, once for all"


@pytest.fixture
def with_agent(open_folder: Path) -> Mapping[str, str]:
    """Return the environment of a process for which another agent is installed."""
    site = open_folder / "site"
    (site / "custom-1.dist-info").mkdir(parents=True)
    (site / "custom-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: custom\nVersion: 1\n")
    (site / "custom-1.dist-info/entry_points.txt").write_text("[farm.agents]\ncustom = custom:custom\n")
    (site / "custom.py").write_text(PLUGIN)
    return {"PYTHONPATH": python_path(site)}


def pull(*words: str, env: Mapping[str, str]) -> str:
    own = {**os.environ, "COLUMNS": "200", **env}
    done = completed("farm.cli.main", ["images", "pull", *words], own)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_environment_of_an_agent_is_prepared_in_advance(open_folder: Path, with_agent: Mapping[str, str]) -> None:
    assert "1 packages of its agent" in pull("--agent", "custom", env=with_agent)
    result = list((settings().cache / "environments").glob("*/lib/python*/site-packages/iniconfig"))
    assert len(result) == 1
    tasks = open_folder / "tasks.jsonl"
    tasks.write_text('{"data_source": "noop", "fields": {}}\n')
    assert "1/1" in pull("--from", str(tasks), "--agent", "custom", env=with_agent)
    assert "give --from, --agent or both" in output_of(main, "pull", code=2)
    assert "unheard" in output_of(main, "pull", "--agent", "unheard", code=1)


def test_hung_installation_ends_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = GatedPackage(tmp_path)
    for name, value in package.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SandboxError, match="not finished within"):
        # long enough for pip to begin the build on a busy machine
        environment(sandbox_config(), (REQUIREMENT,), image(sandbox_config(), "host"), install_s=10.0)
    assert package.n_builds == 1
    assert not [line for line in processes_of(tmp_path) if "backend" in line or "pip" in line]
    package.open()
    assert Path(
        environment(sandbox_config(), (REQUIREMENT,), image(sandbox_config(), "host")).bin_folders[0], "python"
    ).exists(), "it is tried again"

"""Python environments for sandboxes: installed once, a failure told to all who wait, and made ahead from the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from farm.errors import SandboxError
from farm.settings import settings
from tests.services.commands import said
from workers.images import main
from workers.sandboxes.environments import environment
from workers.sandboxes.images import image

FARM = str(Path(sys.executable).parent / "farm")
N_WAITING = 4

PLAYED = """
from workers.agents.harness import Harness, HarnessAgent

def played():
    return HarnessAgent(Harness(name="played", packages=("iniconfig==2.0.0",), command=lambda task: ["true"]))
"""


def failing(log: Path) -> tuple[str, ...]:
    """Packages whose installation writes into a log and fails."""
    return (f"--log={log}", "missing @ file:///nonexistent/missing-1-py3-none-any.whl")


def n_tries(log: Path) -> int:
    return log.read_text().count("No such file or directory: '/nonexistent") if log.exists() else 0


def test_a_failure_is_that_of_all_who_waited(sandbox_settings: Path) -> None:
    log = sandbox_settings / "pip.log"
    together = Barrier(N_WAITING)

    def ask(number: int) -> str:
        together.wait()
        with pytest.raises(SandboxError) as raised:
            environment(failing(log), image("host"))
        return str(raised.value)

    with pytest.raises(SandboxError, match="nonexistent"):
        environment(failing(log), image("host"))
    alone = n_tries(log)
    assert alone > 0
    with ThreadPoolExecutor(N_WAITING) as pool:
        assert len(set(pool.map(ask, range(N_WAITING)))) == 1
    assert n_tries(log) == 2 * alone, "who comes later tries again, once for all"


@pytest.fixture
def with_agent(sandbox_settings: Path) -> Mapping[str, str]:
    """The environment of a process for which one more agent is installed."""
    site = sandbox_settings / "site"
    (site / "played-1.dist-info").mkdir(parents=True)
    (site / "played-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: played\nVersion: 1\n")
    (site / "played-1.dist-info/entry_points.txt").write_text("[farm.agents]\nplayed = played:played\n")
    (site / "played.py").write_text(PLAYED)
    return {"PYTHONPATH": str(site)}


def pull(*words: str, env: Mapping[str, str]) -> str:
    own = {**os.environ, "COLUMNS": "200", **env}
    done = subprocess.run([FARM, "images", "pull", *words], env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_agents_environment_is_made_ahead(sandbox_settings: Path, with_agent: Mapping[str, str]) -> None:
    assert "1 packages of its agent" in pull("--agent", "played", env=with_agent)
    found = list((settings().cache / "environments").glob("*/lib/python*/site-packages/iniconfig"))
    assert len(found) == 1
    tasks = sandbox_settings / "tasks.jsonl"
    tasks.write_text('{"data_source": "noop", "fields": {}}\n')
    assert "1/1" in pull("--from", str(tasks), "--agent", "played", env=with_agent)
    assert "say what: --from, --agent or both" in said(main, "pull", code=2)
    assert "unheard" in said(main, "pull", "--agent", "unheard", code=1)

"""E2B's own client on the farm, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import farm
from farm.embedded.embedded_farm import Embedded
from tests.conftest import absent
from tests.protocols.conftest import PROGRAMS, Start, result_of
from tests.services.api import KEY, RestartableApi
from tests.services.farms import until


def test_python_client_works_as_elsewhere(here: tuple[Embedded, RestartableApi], start: Start, tmp_path: Path) -> None:
    program = start("e2b", "e2b_client", {"key": KEY, "url": f"{here[1].url}/e2b"})
    said = result_of(program, tmp_path / "e2b_client.err")
    assert not said["failures"], "\n".join(f"{name}: {why}" for name, why in said["failures"].items())
    assert said["n"] >= 16
    with farm.connect(here[0].home) as client:
        assert not client.sandboxes.list(), "all were killed"


def test_javascript_client_works_as_elsewhere(here: tuple[Embedded, RestartableApi]) -> None:
    packages = Path(os.environ["FARM_TEST_PROTOCOLS"]) / "e2b-js" / "node_modules"
    if not packages.is_dir():
        absent("e2b for JavaScript is not installed: tests/protocols/environment.sh says why")
    given = {"key": KEY, "url": f"{here[1].url}/e2b", "packages": str(packages)}
    program = ["node", str(PROGRAMS / "e2b_client.mjs"), json.dumps(given)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, '"done"'), done.stderr[-4000:]


def test_sandboxes_of_a_killed_client_end_with_their_timeout(
    here: tuple[Embedded, RestartableApi], start: Start
) -> None:
    killed = start("e2b", "e2b_client", {"key": KEY, "url": f"{here[1].url}/e2b", "waits": True})
    assert killed.stdout
    killed.stdout.readline()
    with farm.connect(here[0].home) as client:
        [left] = client.sandboxes.list()
        handle = client.sandboxes.attach(left.sandbox_id)
        until(lambda: handle.exec("test", "-e", "/tmp/begun").code == 0, "its command has begun")
        killed.kill()
        handle.renew(5)
        until(lambda: handle.state().ended, "its lease has run out, whatever it left running")

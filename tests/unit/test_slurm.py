"""The Slurm job of the examples: a signal ends the node, and no shell before it. Slurm itself is faked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
NODE = """#!{python}
import signal, sys, time
def end(number, frame):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(*sys.argv[1:], flush=True)
while True:
    time.sleep(60)
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
ADDRESSES = {"FARM_STORE_URL": "postgresql://db/farm", "FARM_BROKER_URL": "redis://broker"}


def environment(folder: Path, **addresses: str) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("farm", NODE.replace("{python}", sys.executable))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    return env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"} | addresses


def test_signal_of_a_time_limit_or_of_scancel_drains_the_node(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "--run", "8"]
    with subprocess.Popen(command, env=environment(tmp_path, **ADDRESSES), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "node --run 8\n"
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=600)[0] == "drained\n"
    assert job.returncode == 0


@pytest.mark.parametrize("missing", ADDRESSES)
def test_missing_address_is_named(tmp_path: Path, missing: str) -> None:
    result = {name: value for name, value in ADDRESSES.items() if name != missing}
    job = subprocess.run(["bash", str(SCRIPT)], env=environment(tmp_path, **result), capture_output=True, text=True)
    assert job.returncode != 0
    assert f"{missing}: set it to the address of the" in job.stderr


def test_slurm_signals_the_step_and_requeues_the_job() -> None:
    options = [
        line.removeprefix("#SBATCH ").strip() for line in SCRIPT.read_text().splitlines() if "#SBATCH" in line[:8]
    ]
    assert "--signal=TERM@60" in options
    assert "--requeue" in options

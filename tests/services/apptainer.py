"""Finds the Apptainer or Singularity that tests use, and reports what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from testkit.private_server import Missing

_ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("FARM_TESTS_HOME") or os.environ.get("FARM_HOME") or _ROOT / ".farm").absolute()
"""The folder that `make` fills, with caches that outlive a run of the tests. It is no farm's home while they run."""


def unpacked_binaries() -> Path:
    """Return the folder of the programs that `make apptainer` unpacks."""
    return HOME / "apptainer" / "usr" / "bin"


def apptainer_program(path: str) -> Path:
    """Return the program on this PATH, once it has started successfully. Raises Missing."""
    program = shutil.which("apptainer", path=path) or shutil.which("singularity", path=path)
    if program is None:
        raise Missing("no apptainer: run `make apptainer`")
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise Missing(f"{program} does not start: {shown.stderr.strip()[-300:]}")
    return Path(program)

"""The container runtime's program, and access to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import os, sys
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.images.runtime import exposure
print(*exposure(sandbox_config()), sep=",")
os.chmod(sys.argv[1], 0o700)
print(*exposure(sandbox_config()), sep=",")
"""


def test_home_that_is_closed_later_is_detected() -> None:
    """Root's sandboxes run as another user, for whom the path is then opened; other users' run as themselves."""
    # not pytest's folder, which is already closed to others
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "home"
        program = home / "apptainer/usr/bin/apptainer"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        Path(name).chmod(0o755)
        env = os.environ | {"PATH": str(program.parent)}
        done = subprocess.run([sys.executable, "-c", CODE, home], env=env, capture_output=True, text=True, timeout=600)
        closed = f"{home / 'apptainer'},{home}" if os.geteuid() == 0 else ","
        assert done.stdout.splitlines() == [",", closed], done.stderr


def test_runtime_in_the_farms_home_is_found_without_path(tmp_path: Path) -> None:
    program = tmp_path / "apptainer/usr/bin/apptainer"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    env = os.environ | {"PATH": "/nonexistent", "FARM_HOME": str(tmp_path)}
    code = "from testkit.scratch_folder import sandbox_config; "
    code += "from workers.sandboxes.images.runtime import program; print(program(sandbox_config()))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == str(program), done.stderr

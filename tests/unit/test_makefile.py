"""The Makefile with fakes of Python and pip: it shows progress, and names the owner of folders that block it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.services.farms import farm_folder

ROOT = Path(__file__).parents[2]
NOBODY = 65534
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
  *--no-build-isolation*) ;;
  *wheels.lock)
    sed -n 's/^\\([a-z0-9]*\\)==.*/Collecting \\1==1/p' .venv/wheels.lock
    [ ! -e broken ] || { echo 'ERROR: No matching distribution found'; exit 1; }
    echo 'Installing collected packages: all';;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with all files that make installs from: 25 packages."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    pins = [f"p{number}==1 \\\n    --hash=sha256:{number:064}\n" for number in range(25)]
    (tmp_path / "requirements-runtime.lock").write_text("".join(pins))
    (tmp_path / "requirements.lock").write_text("".join(pins))
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3.11").write_text(PYTHON)
    (programs / "python3.11").chmod(0o755)
    return tmp_path


def make(folder: Path, target: str, *, user: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}/programs:/usr/bin:/bin"
    return subprocess.run(
        ["make", "-C", folder, "--no-print-directory", target],
        env={"PATH": path, "HOME": str(folder), **env},
        user=user,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_installation_shows_progress(clone: Path) -> None:
    done = make(clone, "runtime")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "making .venv with python3.11",
        "installing requirements-runtime.lock (25 packages)",
        "  10 of 25: p9==1",
        "  20 of 25: p19==1",
        "  unpacking",
        "compiling pycosat",
        "installing the farm",
    ]
    assert make(clone, "runtime").stdout == "", "nothing is installed twice"


def test_failed_installation_shows_the_reason(clone: Path) -> None:
    (clone / "broken").touch()
    done = make(clone, "runtime")
    assert done.returncode == 2
    assert "ERROR: No matching distribution found" in done.stderr


@pytest.mark.parametrize(
    ("target", "folder", "remedy"),
    [
        ("runtime", ".venv", "run make as that user or in a clone of your own"),
        ("venv", ".venv", "run make as that user or in a clone of your own"),
        ("apptainer", ".farm", "set FARM_HOME to a folder of your own"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_folder_of_another_user_is_a_one_line_error(
    clone: Path, target: str, folder: str, remedy: str, exists: bool
) -> None:
    with farm_folder() as made:
        shutil.copytree(clone, made / "clone").chmod(0o755)
        closed = made / "clone" / folder if exists else made / "clone"
        closed.mkdir(exist_ok=True)
        closed.chmod(0o555)
        # root may write everywhere
        done = make(made / "clone", target, user=None if os.geteuid() else NOBODY)
        closed.chmod(0o755)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"*** {closed} belongs to " in line
    assert line.endswith(f"may not write to it: {remedy}.  Stop.")

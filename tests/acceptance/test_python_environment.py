"""Environments of other packages become complete after any number of interrupted installs, and then stay unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.services.farms import until

ROOT = Path(__file__).parents[2]
NAMES = [f"part{number}" for number in range(12)]
SCRIPT = f"""set -euo pipefail
. {ROOT}/examples/training/python_environment.sh
if ! is_whole one; then
  begin "twelve packages" {sys.executable}
  install_all "$folder/requirements.txt"
  finish one
fi
"""
SLOW_UV = """#!/bin/sh
case "$1" in
  venv) exit 1;;
  *) echo $$ >"$UV_STARTED"; sleep "$UV_SECONDS"; exit 1;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the requirements of an environment, and a script that builds it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in NAMES:
        metadata = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files = {f"{name}/__init__.py": "", f"{name}/more.py": ""} | {
            f"{name}-1.dist-info/{key}": text for key, text in metadata.items()
        }
        files[f"{name}-1.dist-info/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{name}-1.dist-info/RECORD"])
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
    made = tmp_path / "environment"
    made.mkdir()
    (made / "requirements.txt").write_text("# twelve\n" + "".join(f"{name}==1\n" for name in NAMES))
    (tmp_path / "script.sh").write_text(SCRIPT)
    return made


def started(folder: Path, uv: str | None = None, seconds: float = 0) -> subprocess.Popen[str]:
    path = "/usr/bin:/bin"
    if uv is not None:
        programs = folder.parent / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "uv").write_text(uv)
        (programs / "uv").chmod(0o755)
        path = f"{programs}:{path}"
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder.parent / "wheels"), "PIP_NO_CACHE_DIR": "1"}
    slow = {"UV_STARTED": str(folder.parent / "started"), "UV_SECONDS": str(seconds)}
    return subprocess.Popen(
        ["bash", folder.parent / "script.sh", folder],
        env={"PATH": path, "HOME": str(folder.parent), **own, **slow},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def installed(folder: Path) -> list[str]:
    site = next((folder / ".venv/lib").glob("python3.*/site-packages"))
    return [name for name in NAMES if (site / name / "more.py").exists() and (site / f"{name}-1.dist-info").exists()]


def test_partial_environment_is_completed_and_a_complete_one_is_left_unchanged(folder: Path) -> None:
    output = ended(started(folder))
    assert "0 of 12 packages" in output
    assert "10 of 12 packages" in output
    assert installed(folder) == NAMES
    assert ended(started(folder)) == ""
    site = next((folder / ".venv/lib").glob("python3.*/site-packages"))
    # the state after a kill: files are missing, the last files exist, and a folder has to be removed
    (folder / ".venv/installed-one").unlink()
    (site / "part3/more.py").unlink()
    shutil.rmtree(site / "part4")
    (site / "part4-1.dist-info/INSTALLER").unlink()
    (site / "~art5").mkdir()
    output = ended(started(folder))
    for name in ("part3-1.dist-info", "part4-1.dist-info", "~art5"):
        assert f"not whole: {name}" in output
    assert output.count("not whole") == 3
    assert installed(folder) == NAMES
    shutil.rmtree(folder / ".venv/bin")
    (folder / ".venv/installed-one").unlink()
    (folder / ".venv/made").unlink()
    assert "going on" not in ended(started(folder)), "an environment without its first mark is built again"
    assert installed(folder) == NAMES


def test_signal_stops_the_install_and_the_next_call_continues(folder: Path) -> None:
    process = started(folder, SLOW_UV, seconds=600)
    mark = folder.parent / "started"
    until(lambda: mark.exists() and mark.read_text().strip(), "uv installs")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the next call goes on" in output
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    output = ended(started(folder, SLOW_UV, seconds=0))
    assert "going on with" in output
    assert "uv failed, so pip goes on" in output
    assert installed(folder) == NAMES


def test_call_after_kill_9_waits_for_processes_that_are_left(folder: Path) -> None:
    process = started(folder, SLOW_UV, seconds=3)
    mark = folder.parent / "started"
    until(lambda: mark.exists() and mark.read_text().strip(), "uv installs")
    process.kill()
    output = ended(started(folder, SLOW_UV, seconds=0))
    process.communicate(timeout=60)
    assert "another one works on" in output
    assert "going on with" in output
    assert installed(folder) == NAMES

"""All processes of a command end with it, and with the process that started it, even if they ignore SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.farms import until

ROOT = Path(__file__).parents[3]
COMMAND = """
import os, pathlib, signal, sys, time
if not os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1]).write_text(f"{os.getppid()} {os.getpgid(0)}\\n")
time.sleep(1000)
"""
PARENT = """
import signal, sys, time
from farm.embedded.child_process import ChildProcess
ChildProcess(["bash", *sys.argv[1:]], on_parent_death=signal.SIGTERM)
time.sleep(1000)
"""


def is_empty(group: int) -> bool:
    """Return True if a group has no processes left except zombies."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return not any(line.split()[0] == str(group) and "Z" not in line.split()[1] for line in listed.splitlines())


@pytest.mark.parametrize("killed", ["the parent", "the command"])
def test_whole_process_group_ends(tmp_path: Path, killed: str) -> None:
    up = tmp_path / "up"
    script = ROOT / "examples" / "training" / "process_group.sh"
    words = [sys.executable, "-c", PARENT, str(script), sys.executable, "-c", COMMAND, str(up)]
    with subprocess.Popen(words, cwd=ROOT) as parent:
        until(lambda: up.exists() and up.read_text().endswith("\n"), "the command has a child")
        command, group = map(int, up.read_text().split())
        assert not is_empty(group)
        os.kill(parent.pid if killed == "the parent" else command, signal.SIGKILL)
        until(lambda: is_empty(group), "nothing is left of it")
        parent.kill()

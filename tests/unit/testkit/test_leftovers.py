"""Leftovers of sandboxes are detected, whatever their parent process."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from testkit.leftovers import Leftovers
from testkit.scratch_folder import sandbox_config
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import until


def test_stopped_farm_has_no_leftovers(tmp_path: Path) -> None:
    with farm_in(tmp_path):
        assert not any(Leftovers(tmp_path).leftovers().values())


def test_folder_socket_and_descriptor_are_detected(tmp_path: Path) -> None:
    with farm_in(tmp_path):
        leftovers = Leftovers(tmp_path)
        (sandbox_config().sandboxes_folder / "one").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "socket"))
            result = leftovers.leftovers()
        assert result["folders"] == ["one"]
        assert len(result["sockets"]) == 1
        assert result["descriptors"] == ["1 more than before"]


@pytest.mark.parametrize("by", ["environment", "working folder", "command line"])
def test_orphaned_process_is_detected(tmp_path: Path, by: str) -> None:
    """The shell that starts it exits at once."""
    leftovers = Leftovers(tmp_path)
    name = str(tmp_path) if by == "command line" else "left"
    done = subprocess.run(
        ["bash", "-c", 'exec -a "$0" sleep 100 >/dev/null 2>&1 & echo $!', name],
        env={**os.environ, "PLACE": str(tmp_path) if by == "environment" else ""},
        cwd=tmp_path if by == "working folder" else "/",
        capture_output=True,
        check=True,
    )
    pid = int(done.stdout)
    try:
        # during its exec, the process shows no command line
        until(lambda: Path(f"/proc/{pid}/cmdline").read_text() == f"{name}\x00100\x00", "it is that program")
        with farm_in(tmp_path):
            result = leftovers.leftovers()["processes"]
        assert [line.split()[0] for line in result] == [str(pid)]
    finally:
        os.kill(pid, 9)


def test_unmarked_child_is_detected(tmp_path: Path) -> None:
    with farm_in(tmp_path / "other"):
        leftovers = Leftovers(tmp_path / "other")
        with subprocess.Popen(["sleep", "100"], cwd="/") as child:
            result = leftovers.leftovers()["processes"]
            child.kill()
        assert [line.split()[0] for line in result] == [str(child.pid)]

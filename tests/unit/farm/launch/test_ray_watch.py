"""The program between a Ray actor and its node: the node gets SIGTERM whenever the program ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from farm.embedded.child_process import ChildProcess
from tests.services.farms import until

NODE = """
import signal, sys
from pathlib import Path
def end(number, frame):
    Path(sys.argv[1]).write_text("handed back")
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).write_text("ready")
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_node_releases_its_rollouts(tmp_path: Path, number: signal.Signals) -> None:
    said = tmp_path / "said"
    node = [sys.executable, "-c", NODE, str(said)]
    watch = ChildProcess([sys.executable, "-m", "farm.launch.ray_watch", *node])
    try:
        until(lambda: said.exists() and said.read_text() == "ready", "the node is ready")
        os.kill(watch.pid, number)
        until(lambda: said.read_text() == "handed back", "the node was told to end")
        assert watch.process.wait(600) == (7 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        watch.end(0)

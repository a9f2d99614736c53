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
    state = tmp_path / "state"
    node = [sys.executable, "-c", NODE, str(state)]
    watch = ChildProcess([sys.executable, "-m", "farm.launch.ray_watch", *node])
    try:
        until(lambda: state.exists() and state.read_text() == "ready", "the node is ready")
        os.kill(watch.pid, number)
        until(lambda: state.read_text() == "handed back", "the node releases its rollouts")
        assert watch.process.wait(600) == (7 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        watch.end(0)

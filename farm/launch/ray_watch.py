"""The program between a Ray actor and its node: `python -m farm.launch.ray_watch COMMAND…`.

Ray kills the children of an actor that it ends. This is one, and its own child gets SIGTERM through its death: a node
then releases its rollouts, as when this gets SIGTERM itself.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

from farm.embedded.child_process import ChildProcess

_POLL_S = 0.5


def main() -> int:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    child = ChildProcess(sys.argv[1:], on_parent_death=signal.SIGTERM)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.process.wait(_POLL_S)
        if received:
            received.clear()
            child.terminate()


if __name__ == "__main__":
    sys.exit(main())

"""Runs the fork server of a node's workers; only for its supervisor: `python -m workers.queue FD`."""

from __future__ import annotations

import sys

from farm.startup import frozen_imports

with frozen_imports():
    from workers.queue.worker_fork_server import main

main(int(sys.argv[1]))

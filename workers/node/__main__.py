"""Runs the supervisor of one node: `python -m workers.node`."""

from __future__ import annotations

from farm.startup import frozen_imports

with frozen_imports():
    from workers.node.supervisor import main

main()

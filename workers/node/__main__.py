"""Runs the supervisor of one node: `python -m workers.node`."""

from __future__ import annotations

from workers.node.command import main

main()

"""The log of a node's processes, without the secrets of their rollouts (`farm.observing.process_log`)."""

from __future__ import annotations

import logging

from farm.observing import process_log
from farm.settings import Settings
from workers.stages.redaction import in_use

_AT_INFO = ("workers.node", "workers.queue")
"""The loggers that are also written at level INFO: start and end of the node, and ends of stages; others at WARNING."""


def set_up(options: Settings) -> None:
    """Write to standard error from now on."""
    where = f"{options.node}/{options.pool}" if options.pool else options.node
    process_log.set_up(options, options.pool or "node", where, in_use.redacted)
    for name in _AT_INFO:
        logging.getLogger(name).setLevel(logging.INFO)

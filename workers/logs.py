"""The log of a node's processes, without the secrets of what they play (`farm.observing.process_log`)."""

from __future__ import annotations

import logging

from farm.observing import process_log
from farm.settings import Settings
from workers.redaction import in_use

_NODE = "workers.node"
"""The logger that is also written at level INFO: start and end of the node. Of all others, warnings."""


def set_up(options: Settings) -> None:
    """Write to standard error from now on."""
    where = f"{options.node}/{options.pool}" if options.pool else options.node
    process_log.set_up(options, options.pool or "node", where, in_use.redacted)
    logging.getLogger(_NODE).setLevel(logging.INFO)

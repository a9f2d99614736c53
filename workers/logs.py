"""The log of a node's processes: a line an event, with the node's name in it, as text or as JSON (`FARM_LOG=json`)."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from farm.settings import Settings
from workers.redaction import in_use

_NODE = "workers.node"
"""The logger that is also written at level INFO: start and end of the node. Of all others, warnings."""


class _Lines(logging.Formatter):
    """Objects of JSON, one a line."""

    def __init__(self, node: str, pool: str) -> None:
        super().__init__()
        self._known = {"node": node, "pool": pool} if pool else {"node": node}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname, **self._known, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return in_use.redacted(json.dumps(line))


class _Text(logging.Formatter):
    """Plain lines."""

    def format(self, record: logging.LogRecord) -> str:
        return in_use.redacted(super().format(record))


def set_up(options: Settings) -> None:
    """Write to standard error from now on."""
    handler = logging.StreamHandler()
    if options.log == "json":
        handler.setFormatter(_Lines(options.node, options.pool))
    else:
        where = f"{options.node}/{options.pool}" if options.pool else options.node
        shown = where.replace("%", "%%")
        handler.setFormatter(_Text(f"%(asctime)s %(levelname)s {shown} %(name)s: %(message)s"))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_NODE).setLevel(logging.INFO)

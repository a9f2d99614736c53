"""Deleting a sandbox's folder from outside of its namespaces."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def remove(state: Path) -> None:
    """Delete the folder of a sandbox that has ended; harmless if it is gone. Blocks.

    `rm`, as the sandbox may have left folders nested deeper than Python's own delete can follow; as root of a user
    namespace, as it may have left some that even their owner cannot enter, overlayfs among them.
    """
    enter = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    subprocess.run(
        [*enter, "rm", "-rf", "--one-file-system", "--", str(state)], stdin=subprocess.DEVNULL, capture_output=True
    )

"""Deleting a sandbox's folder from outside of its namespaces."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

_TRIES = 20
_PAUSE_S = 0.05
_SILENT = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]


def remove(state: Path) -> bool:
    """Delete the folder of a sandbox that has ended; harmless if it is gone. Returns whether it is gone now. Blocks.

    `rm`, as the sandbox may have left folders nested deeper than Python's own delete can follow; as root of a user
    namespace, as it may have left some that even their owner cannot enter, overlayfs among them. More than once, as a
    process that is being killed may write until it is dead.
    """
    argv = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    argv += ["rm", "-rf", "--one-file-system", "--", str(state)]
    for _ in range(_TRIES):
        if not os.path.lexists(state):
            return True
        # no subprocess.run, which needs descriptors: a start may have failed because there are none
        try:
            os.waitpid(os.posix_spawnp(argv[0], argv, os.environ, file_actions=_SILENT), 0)
        except OSError:
            # no processes either: what a start that failed has left is simple enough
            shutil.rmtree(state, ignore_errors=True)
        if os.path.lexists(state):
            time.sleep(_PAUSE_S)
    return not os.path.lexists(state)

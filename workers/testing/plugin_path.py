"""The test plug-ins `noop` and `chat`: installed only if PYTHONPATH contains their folder, never in production.

`PYTHONPATH=$(python -m workers.testing.plugin_path) farm up` starts a farm with them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from farm.plugins import find_installed

PLUGINS = Path(__file__).with_name("plugins")
"""A folder with a distribution's metadata only, which names the plug-ins of this package."""


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH of these folders, followed by this process's own."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def install() -> None:
    """Install the plug-ins for this process and those that it starts from now on."""
    if str(PLUGINS) in sys.path:
        return
    sys.path.append(str(PLUGINS))
    os.environ["PYTHONPATH"] = python_path(PLUGINS)
    find_installed()


if __name__ == "__main__":
    print(PLUGINS)

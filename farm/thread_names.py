"""Names of threads in the kernel, which Python sets itself only from 3.14 on."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

_MAX_CHARS = 15


def name_thread(name: str) -> None:
    """Name the calling thread for `top -H` and `/proc`; the kernel keeps 15 characters."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:_MAX_CHARS])

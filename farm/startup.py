"""The start and the end of the farm's own programs: modules are loaded without garbage collections, and not freed.

A worker imports 200,000 objects that live as long as it does. Collections while they come, and at the process's end,
would take as long again as half of the imports; later ones would stop an event loop for a tenth of a second each.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect nothing until the block ends, nor ever afterwards of what lives then. For whole programs alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, after its threads and its exit functions, but free nothing.

    To free each object of a forked process would first copy every page that it shares: a tenth of a second.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)

"""The start of the farm's own programs: modules are loaded without garbage collections, and kept out of later ones.

A worker imports 200,000 objects that live as long as it does. Collections while they come, and at the process's end,
would take as long again as half of the imports; later ones would stop an event loop for a tenth of a second each.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect nothing until the block ends, nor ever afterwards of what lives then. For whole programs alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

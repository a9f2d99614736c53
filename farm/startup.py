"""Garbage collection in the farm's programs: none during imports and at exit, and few full collections in between.

A worker imports 200,000 objects that live as long as it does. Collecting them during the imports and at exit would add
half of the import time. A full collection stops every thread: 0.1 s with 256 open gateways, 0.9 s with 2,048.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_NEVER = 2**31 - 1


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Collect nothing during the block, and never the objects that exist at its end or at exit. For whole programs."""
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def limit_full_collections(share: float = 1 / 300, least_s: float = 60.0) -> None:
    """Run full collections in a thread, at most one per `least_s` seconds and for at most this share of the time.

    By default the interpreter starts one each time the number of tracked objects has grown by a quarter: every few
    seconds in a busy worker. Collections of young objects take milliseconds and stay with the interpreter.
    """
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
    threading.Thread(target=_collect_forever, args=(share, least_s), name="garbage", daemon=True).start()


def _collect_forever(share: float, least_s: float) -> NoReturn:
    pause_s = least_s
    while True:
        time.sleep(pause_s)
        started = time.perf_counter()
        gc.collect()
        pause_s = max(least_s, (time.perf_counter() - started) / share)


def end_process(code: int) -> NoReturn:
    """End this process like the interpreter does, with its threads and exit functions, but free no objects.

    In a forked process, freeing an object copies its shared page: 0.1 s for all of them.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)

"""Garbage collection and the exit of the farm's own programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from farm.startup import end_process

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()
atexit.register(print, "exit function", end=" ")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", end=" "))).start()
end_process(CODE)
"""


@pytest.mark.parametrize("code", [0, 75])
def test_process_exit_waits_for_threads_and_exit_functions_and_frees_nothing(code: int) -> None:
    program = PROGRAM.replace("CODE", str(code))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "thread exit function ", "")


COLLECTIONS = """
import gc, time, weakref
from farm.startup import limit_full_collections

full = []
gc.callbacks.append(lambda phase, info: full.append(info) if (phase, info["generation"]) == ("stop", 2) else None)
LIMIT

class Cycle:
    def __init__(self):
        self.itself = self

dropped = [weakref.ref(Cycle()) for _ in range(3)]
kept = [[i] for i in range(400_000)]
print("full" if full else "none", end=" ")
deadline = time.monotonic() + 20
while any(each() for each in dropped) and time.monotonic() < deadline:
    time.sleep(0.01)
print("kept" if any(each() for each in dropped) else "freed")
"""


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("", "full freed"), ("limit_full_collections(least_s=3.0)", "none freed")],
    ids=["the interpreter's", "limited"],
)
def test_full_collections_run_by_time_not_by_growth(limit: str, expected: str) -> None:
    program = COLLECTIONS.replace("LIMIT", limit)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_slow_full_collection_is_followed_by_a_long_pause() -> None:
    program = """
import gc, time
from farm.startup import limit_full_collections

times = []
gc.callbacks.append(lambda phase, info: times.append(time.monotonic()) if info["generation"] == 2 else None)
gc.disable()
kept = [[i] for i in range(400_000)]
gc.enable()
limit_full_collections(share=1 / 50, least_s=0.1)
while len(times) < 4:
    time.sleep(0.01)
print((times[2] - times[1]) / (times[1] - times[0]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert float(done.stdout) > 30

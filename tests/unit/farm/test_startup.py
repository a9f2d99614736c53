"""The end of the farm's own programs."""

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
def test_a_process_waits_for_its_threads_and_exit_functions_and_frees_nothing(code: int) -> None:
    program = PROGRAM.replace("CODE", str(code))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "thread exit function ", "")

"""The supervisor of a program, as a real process: its exit codes for each end of the program."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from workers.evaluators import programs, tests
from workers.evaluators.program_source import source_of
from workers.evaluators.program_tests import descendants, evaluator
from workers.evaluators.program_tests.program_supervisor import COMPUTED, SLEPT

SUPERVISOR = source_of("program_tests.descendants", "program_tests.program_supervisor")
CROWD = """
    import os, time
    end = time.time() + 20
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            while time.time() < end: pass
            os._exit(0)
    time.sleep(60)
    """
FIRST_CHILD_ENDS = """
    import os, time
    end = time.time() + 20
    if os.fork() == 0:
        if os.fork() == 0:
            while time.time() < end: pass
        os._exit(0)
    time.sleep(60)
    """

ESCAPING = """
    import os, time
    begins, held = os.pipe()
    for _ in range(24):
        if os.fork() == 0:
            os.close(held)
            os.read(begins, 1)
            end = time.time() + 7
            while time.time() < end:
                if os.fork(): os._exit(0)
            os._exit(0)
    """
"""Ends, and for 7 s leaves processes that fork and exit faster than they can be found."""


def ended(program: str, limit_s: float = 30.0, cpu_s: float = 10.0) -> int:
    command = [sys.executable, "-I", "-c", SUPERVISOR, str(limit_s), str(cpu_s)]
    return subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60
    ).returncode


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(121)", 1),
        ("import os; os._exit(124)", 1),
        # a shell's exit code for a signal is not a signal
        ("import os; os._exit(137)", 1),
        ("import os; os._exit(129)", 1),
        ("import os; os._exit(255)", 1),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
    ],
)
def test_signal_is_distinguished_from_exit_codes(program: str, code: int) -> None:
    assert ended(program) == code


@pytest.mark.parametrize("program", ["while True: pass", CROWD, FIRST_CHILD_ENDS], ids=["itself", "crowd", "orphan"])
def test_cpu_time_of_all_child_processes_counts(program: str) -> None:
    assert ended(program, limit_s=4.0, cpu_s=0.2) == COMPUTED


def test_sleeping_program_did_not_compute() -> None:
    assert ended("import time; time.sleep(60)", limit_s=1.0, cpu_s=0.9) == SLEPT


def test_processes_that_take_seconds_to_end_are_not_left_behind() -> None:
    assert ended(ESCAPING) == 0


def test_callers_wait_longer_than_the_supervisor_needs_to_end_all_processes() -> None:
    assert min(evaluator._GRACE_PERIOD_S, programs._GRACE_PERIOD_S, tests._READER_S) > descendants._ENDING_S + 2.0

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EvaluatorError
from tests.conftest import absent
from workers.evaluators import process_end
from workers.evaluators.node_conditions import Conditions, observed, shortage
from workers.evaluators.process_end import EndCause, ProcessEnd, Trial, doing, settle
from workers.plugins.interfaces import ExecResult

POLICY, FARM, UNKNOWN = EndCause.POLICY, EndCause.FARM, EndCause.UNKNOWN
FULL = Conditions(shortage="the disk is full")
FULL_BEFORE = Conditions(shortage="the disk is full", earlier=True)
LATE = Conditions(late_s=9.0)


def late(**fields: Any) -> ProcessEnd:
    return ProcessEnd(None, timed_out=True, limit_s=10.0, **fields)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        pytest.param(ProcessEnd(0), POLICY, id="ended"),
        pytest.param(ProcessEnd(1), POLICY, id="exit-code"),
        pytest.param(ProcessEnd(120), POLICY, id="exit-code-that-is-no-signal"),
        pytest.param(ProcessEnd(255), POLICY, id="exit-code-beyond-signals"),
        pytest.param(ProcessEnd(1, conditions=FULL), UNKNOWN, id="exit-code-on-a-full-disk"),
        pytest.param(ProcessEnd(1, conditions=FULL_BEFORE), FARM, id="exit-code-on-a-disk-that-was-full"),
        pytest.param(ProcessEnd(1, conditions=LATE), POLICY, id="exit-code-of-a-late-machine"),
        pytest.param(ProcessEnd(-9), UNKNOWN, id="killed"),
        pytest.param(ProcessEnd(137), UNKNOWN, id="killed-below-a-shell"),
        pytest.param(ProcessEnd(-15), UNKNOWN, id="terminated"),
        pytest.param(ProcessEnd(-11), UNKNOWN, id="segmentation-fault"),
        pytest.param(ProcessEnd(-9, conditions=FULL), UNKNOWN, id="killed-on-a-full-disk"),
        pytest.param(ProcessEnd(137, conditions=FULL_BEFORE), FARM, id="killed-below-a-shell-on-a-disk-that-was-full"),
        pytest.param(ProcessEnd(-9, confined=True), FARM, id="confined-killed"),
        pytest.param(ProcessEnd(-15, confined=True), FARM, id="confined-terminated"),
        pytest.param(ProcessEnd(-11, confined=True), UNKNOWN, id="confined-segmentation-fault"),
        pytest.param(ProcessEnd(-signal.SIGXCPU, confined=True), POLICY, id="confined-out-of-cpu-time"),
        pytest.param(ProcessEnd(-signal.SIGXFSZ), POLICY, id="file-size"),
        pytest.param(ProcessEnd(-9, limit="memory limit"), POLICY, id="killed-by-its-limit"),
        pytest.param(ProcessEnd(137, limit="memory limit", conditions=FULL), POLICY, id="killed-by-its-limit-first"),
        pytest.param(ProcessEnd(1, limit="disk limit", conditions=FULL_BEFORE), POLICY, id="limit-before-the-node"),
        pytest.param(late(), UNKNOWN, id="time-limit"),
        pytest.param(late(cpu_s=0.1), UNKNOWN, id="asleep-or-frozen"),
        pytest.param(late(cpu_s=0.1, confined=True), FARM, id="confined-and-frozen"),
        pytest.param(late(cpu_s=6.0, confined=True), POLICY, id="confined-and-computed"),
        pytest.param(late(cpu_s=6.0), POLICY, id="computed"),
        pytest.param(late(cpu_s=6.0, conditions=LATE), POLICY, id="computed-though-late"),
        pytest.param(late(cpu_s=0.1, conditions=LATE), FARM, id="late-loop"),
        pytest.param(late(cpu_s=2.0, waited_s=7.0), FARM, id="no-cpu-to-be-had"),
        pytest.param(late(cpu_s=2.0, cpu_limit_s=2.0, waited_s=7.0), POLICY, id="its-own-crowd"),
        pytest.param(late(cpu_s=2.0, cpu_limit_s=2.0, conditions=LATE), POLICY, id="its-own-crowd-delays-the-loop"),
        pytest.param(late(cpu_s=1.9, cpu_limit_s=2.0, waited_s=7.0), FARM, id="less-cpu-than-it-may-have"),
        pytest.param(late(cpu_s=2.0, cpu_limit_s=2.0, conditions=FULL), UNKNOWN, id="its-own-crowd-on-a-full-disk"),
        pytest.param(late(conditions=LATE), FARM, id="late-loop-and-cpu-time-unknown"),
        pytest.param(late(conditions=Conditions(late_s=1.0)), UNKNOWN, id="hardly-late"),
        pytest.param(late(cpu_s=0.1, conditions=FULL), UNKNOWN, id="time-limit-on-a-full-disk"),
        pytest.param(ProcessEnd(None, gone="sandbox s1 is gone"), UNKNOWN, id="gone"),
        pytest.param(ProcessEnd(None, gone="sandbox s1 is gone", conditions=FULL), UNKNOWN, id="gone-on-a-full-disk"),
        pytest.param(ProcessEnd(None), UNKNOWN, id="unknown"),
    ],
)
def test_end_is_attributed_to_its_cause(end: ProcessEnd, cause: EndCause) -> None:
    assert doing(end)[0] is cause


def test_end_is_read_from_a_command_in_a_sandbox() -> None:
    end = ProcessEnd.of(ExecResult(None, b"", b"", timed_out=True), 5.0, LATE)
    assert (end.timed_out, end.limit_s, doing(end)[0]) == (True, 5.0, FARM)
    assert doing(ProcessEnd.of(ExecResult(137, b"", b"", limit="memory limit"), 5.0, Conditions()))[0] is POLICY


def settled(ends: list[ProcessEnd | str], control: str = "") -> str:
    """Return the score of a sequence of trials; a string is a trial that passed."""
    remaining = list(ends)

    async def trial() -> Trial[str]:
        end = remaining.pop(0)
        return Trial("1", ProcessEnd(0), passed=True) if isinstance(end, str) else Trial("0", end)

    async def controlled() -> str:
        return control

    score = asyncio.run(settle(trial, controlled, "r1"))
    assert not remaining
    return score


KILLED, HANGS, GONE = ProcessEnd(-9), late(cpu_s=0.0), ProcessEnd(None, gone="sandbox s1 is gone")
SHORT = ProcessEnd(1, conditions=FULL)


@pytest.mark.parametrize(
    ("ends", "score"),
    [
        (["passed"], "1"),
        ([ProcessEnd(1)], "0"),
        ([KILLED, KILLED], "0"),
        ([KILLED, ProcessEnd(137)], "0"),
        ([KILLED, "passed"], "1"),
        ([KILLED, ProcessEnd(1)], "0"),
        ([HANGS, HANGS], "0"),
        ([HANGS, "passed"], "1"),
        ([GONE, GONE], "0"),
        # which it can choose, a different one each time
        ([KILLED, ProcessEnd(-15)], "0"),
        ([KILLED, HANGS], "0"),
        ([HANGS, GONE], "0"),
        ([GONE, ProcessEnd(129)], "0"),
        # it used up the node's scarce resource, each time
        ([SHORT, SHORT], "0"),
        ([SHORT, KILLED], "0"),
        ([SHORT, "passed"], "1"),
        ([SHORT, ProcessEnd(1)], "0"),
        ([ProcessEnd(-9, conditions=FULL), late(cpu_s=0.1, conditions=FULL)], "0"),
    ],
)
def test_same_end_before_and_after_a_passed_control_is_the_submissions_fault(
    ends: list[ProcessEnd | str], score: str
) -> None:
    assert settled(ends) == score


@pytest.mark.parametrize(
    ("ends", "control", "message"),
    [
        ([ProcessEnd(1, conditions=FULL_BEFORE)], "", "r1: the disk is full"),
        ([late(conditions=LATE)], "", "the machine was late by 9.0 s"),
        ([KILLED], "it was killed too", "a control that must pass also failed: it was killed too"),
        ([ProcessEnd(1, conditions=FULL)], "it is full too", "the disk is full, and a control .* it is full too"),
        ([KILLED, ProcessEnd(-9, conditions=FULL_BEFORE)], "", "the disk is full"),
        ([HANGS, late(conditions=LATE)], "", "late"),
    ],
)
def test_farm_fault_is_an_error_and_not_a_score(ends: list[ProcessEnd | str], control: str, message: str) -> None:
    with pytest.raises(EvaluatorError, match=message):
        settled(ends, control)


def scored(passes: bool, control: str, scorer: str) -> int:
    """Score a submission that ends with an exit code; return how often the control ran."""
    n_controls = 0

    async def trial() -> Trial[str]:
        return Trial("", ProcessEnd(int(not passes)), passed=passes)

    async def controlled() -> str:
        nonlocal n_controls
        n_controls += 1
        return control

    asyncio.run(settle(trial, controlled, "r1", scorer=scorer))
    return n_controls


def test_scorer_that_passes_nothing_gives_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(
            EvaluatorError, match="r1: it ended with exit code 1, and a control that must pass did not: no"
        ):
            scored(False, "no", "broken")
    assert [scored(False, "", "whole"), scored(False, "no", "whole")] == [1, 0], "the control runs once"
    assert [scored(True, "no", "passed"), scored(False, "no", "passed")] == [0, 0], "one pass is enough"
    later = time.monotonic() + 601.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(EvaluatorError, match="did not: no"):
        scored(False, "no", "whole")


def test_run_that_proves_its_scorer_needs_no_control() -> None:
    async def controlled() -> str:
        return "no"

    async def trial() -> Trial[str]:
        return Trial("0", ProcessEnd(1), stands=True)

    assert asyncio.run(settle(trial, controlled, "r1", scorer="shown")) == "0"
    with pytest.raises(EvaluatorError, match="did not: no"):
        scored(False, "no", "shown")


def test_proofs_older_than_ten_minutes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "_proven", {})
    now = time.monotonic()
    for number in range(3):
        monkeypatch.setattr(time, "monotonic", lambda at=now + 400.0 * number: at)
        scored(True, "", f"of instance {number}")
    assert [*process_end._proven] == ["of instance 1", "of instance 2"]


def measured(during: Callable[[], Any]) -> Conditions:
    async def measure() -> Conditions:
        async with observed() as conditions:
            await asyncio.sleep(0)
            during()
        return conditions

    return asyncio.run(measure())


def test_blocked_event_loop_is_measured_as_late() -> None:
    assert measured(lambda: time.sleep(0.7)).late_s > 0.5
    assert measured(lambda: None).shortage == ""


@pytest.mark.parametrize(("options", "words"), [("size=64k", "is full"), ("size=16m,nr_inodes=8", "no inodes left")])
def test_full_file_system_is_a_shortage(tmp_path: Path, options: str, words: str) -> None:
    assert shortage((tmp_path,)) == ""
    assert shortage((tmp_path / "absent",)) == ""
    imports = "from pathlib import Path; from workers.evaluators.node_conditions import shortage"
    ask = f"{imports}; print(shortage((Path('{tmp_path}'),)))"
    script = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec {sys.executable} -c "$0"'
    ran = subprocess.run(["unshare", "-rm", "sh", "-c", script, ask], capture_output=True, text=True, check=False)
    if "unshare" in ran.stderr:
        absent(f"no user namespaces: {ran.stderr}")
    assert words in ran.stdout, ran.stderr


def test_missing_descriptors_are_a_shortage() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(4):
            os.close(taken.pop())
        assert "descriptor" in shortage(())
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert shortage(()) == ""

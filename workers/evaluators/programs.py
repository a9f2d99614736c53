"""Scores of programs by checks that run in a sandbox that the policy never touched.

It has two processes: the judge (`program_judge.py`) has the checks and their expected values, and compares; the program
runs in the other (`program_candidate.py`), which receives arguments and returns values, as data. The judge's report
goes to a pipe that the program does not have. The report is verified here by the nonce of this run and two canaries
under random names: one must pass and one must fail. `process_end.py` attributes an end without a pass, with a program
that must pass as the control.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Any, ClassVar

from farm.errors import SandboxError
from workers.evaluators.node_conditions import Conditions, observed
from workers.evaluators.process_end import ProcessEnd, Trial, settle, signal_of
from workers.evaluators.program_source import source_of
from workers.plugins.interfaces import ExecResult, FreshSandbox, Sandbox, Score, Submission

SOLUTION = "solution.py"
"""The file of a submission that contains the program."""
_FOLDER = "/tmp/checks"  # noqa: S108  (of the sandbox, which is not shared)
_LAST_LINES = 15
_TRIAL_SHARE = 0.4
"""The share of an evaluator's time for one run, as a program may have to be run twice."""
_CPU_SHARE = 1 / 8
"""The share of a run's time that is its CPU limit: an endless loop reaches it first, even on a busy machine."""
_CONTROL_S = 30.0
_GRACE_PERIOD_S = 15.0
"""Seconds after the limit in which the judge, which enforces it, may end the program's processes and report."""
_WORKS = {"prompt": "", "solution": "def f(x): return x\n", "entry_point": "f"}
_CHECKS_OF_IT = "def check(candidate):\n    assert candidate(1) == 1\n"


class ProgramEvaluator:
    """The checks of one HumanEval problem: `test` defines `check(candidate)`.

    The prompt runs first, as its helper functions and imports are part of the problem.
    """

    name: ClassVar[str] = "program"

    def __init__(self, prompt: str, test: str, entry_point: str) -> None:
        self._checks = {"prompt": prompt, "test": test, "entry_point": entry_point}

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Return 1.0 if all checks passed, else 0.0; a program that hangs scores 0.0.

        Raises EvaluatorError if a fault of the farm ended it, SandboxError if no sandbox is available.
        """
        solution = submission.files.get(SOLUTION, "")
        if not solution.strip():
            return Score(0.0, {"reason": f"there is no {SOLUTION}, or it is empty"})
        job = {**self._checks, "solution": solution}
        limit_s = timeout_s * _TRIAL_SHARE

        async def control() -> str:
            trial = await _trial(fresh, {**_WORKS, "test": _CHECKS_OF_IT}, min(_CONTROL_S, timeout_s))
            return "" if trial.passed else f"a program that is right: {trial.value.details}"

        return await settle(lambda: _trial(fresh, job, limit_s), control, "the program", scorer=self.name)


async def _trial(fresh: FreshSandbox, checks: dict[str, str], limit_s: float) -> Trial[Score]:
    canaries, nonce = _canaries(), secrets.token_hex(16)
    job = {
        **checks,
        "nonce": nonce,
        "canaries": {name: source for name, (source, _) in canaries.items()},
        "candidate": source_of("program_values", "program_candidate"),
        "limit_s": limit_s,
        "cpu_s": max(1, round(limit_s * _CPU_SHARE)),
    }
    async with fresh() as sandbox:
        judge = source_of("program_values", "program_tests.descendants", "program_judge")
        await sandbox.write_file(f"{_FOLDER}/judge.py", judge.encode())
        async with observed() as conditions:
            result = await _judged(sandbox, job, limit_s)
    if isinstance(result, SandboxError):
        end = ProcessEnd(None, gone=str(result), conditions=conditions)
        return Trial(Score(0.0, {"passed": False, "reason": f"it ended its sandbox: {result}"}), end)
    report = _report(result.stdout, nonce)
    expected = {name: passes for name, (_, passes) in canaries.items()}
    if report is None:
        # The judge itself was ended, or cannot run in this sandbox: its exit code says nothing about the program.
        unknown = {} if result.code is None or signal_of(result.code) else {"code": None}
        return Trial(Score(0.0, {"passed": False, **end_details(result)}), _end(result, unknown, limit_s, conditions))
    tampered = bool(report["canaries"]) and report["canaries"] != expected
    passed = report["passed"] is True and report["canaries"] == expected and result.code == 0
    end = report["end"]
    details = {
        "passed": passed,
        **end_details(replace(result, stdout=b"")),
        **{"exit_code": end["code"], "timed_out": end["timed_out"], "reason": report["error"][:300]},
        **({"tampered": True} if tampered else {}),
    }
    return Trial(Score(float(passed), details), _end(result, end, limit_s, conditions), passed)


async def _judged(sandbox: Sandbox, job: dict[str, Any], limit_s: float) -> ExecResult | SandboxError:
    command = ["python3", "-I", "-B", f"{_FOLDER}/judge.py"]
    try:
        return await sandbox.exec(command, timeout_s=limit_s + _GRACE_PERIOD_S, stdin=json.dumps(job).encode())
    except SandboxError as error:
        return error


def _canaries() -> dict[str, tuple[str, bool]]:
    """Return checks under random names, and whether each passes: they compare values that the program echoes."""
    value = secrets.token_hex(8)
    canaries = {}
    for passes in (True, False):
        name = f"check_{secrets.token_hex(8)}"
        expected = value if passes else value[::-1] + "-"
        canaries[name] = (f"def {name}(echo):\n    assert echo({value!r}) == {expected!r}\n", passes)
    return canaries


def _report(output: bytes, nonce: str) -> dict[str, Any] | None:
    """Return the judge's report if it is of this run, else None."""
    lines = output.splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return None
    whole = isinstance(report, dict) and report.keys() >= {"passed", "canaries", "error", "end"}
    return report if whole and report.get("nonce") == nonce else None


def _end(result: ExecResult, end: dict[str, Any], limit_s: float, conditions: Conditions) -> ProcessEnd:
    """Return the program's own end if the judge reported it, else the judge's."""
    seen = {"code": result.code, "timed_out": result.timed_out, **end}
    cpu_limit_s = limit_s * _CPU_SHARE
    return ProcessEnd(**seen, limit_s=limit_s, cpu_limit_s=cpu_limit_s, limit=result.limit, conditions=conditions)


def end_details(result: ExecResult) -> dict[str, Any]:
    """Return the end of a command for the details of a score: exit code, time limit, last lines."""
    output = (result.stdout + b"\n" + result.stderr).decode("utf-8", "replace")
    lines = [line for line in output.splitlines() if line.strip()]
    return {
        "exit_code": result.code,
        "timed_out": result.timed_out,
        "last_lines": [line[:300] for line in lines[-_LAST_LINES:]],
    }

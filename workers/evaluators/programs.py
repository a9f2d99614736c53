"""Scores a program by running checks over it in a sandbox that the policy never touched.

Success is a nonce printed after the checks. It is read before the program runs, so a program that exits early, prints
a verdict or reads standard input gains nothing. A program that searches the interpreter's frames for it could still
find it: checks in one interpreter cannot rule that out.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, ClassVar

from workers.interfaces import ExecResult, FreshSandbox, Score, Submission

SOLUTION = "solution.py"
"""The file of a submission that holds the program."""
_FOLDER = "/tmp/checks"  # noqa: S108  (of the sandbox, which nobody shares)
_LAST_LINES = 15

_RUNNER = """\
import json, os, sys, types

def run():
    nonce = sys.stdin.readline().strip()
    sys.stdin = open(os.devnull)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "checks.json")) as file:
        checks = json.load(file)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for part in ("prompt", "solution", "test"):
        exec(compile(checks[part], part + ".py", "exec"), module.__dict__)
    entry = getattr(module, checks["entry_point"])
    module.check(entry)
    sys.stdout.flush()
    print("\\n" + nonce, flush=True)

run()
"""


class ProgramEvaluator:
    """The checks of one HumanEval problem: `test` defines `check(candidate)`.

    The prompt runs first, as its helper functions and imports are part of the problem.
    """

    name: ClassVar[str] = "program"

    def __init__(self, prompt: str, test: str, entry_point: str) -> None:
        self._prompt = prompt
        self._test = test
        self._entry_point = entry_point

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """1.0 if all checks passed, else 0.0; a program that hangs is 0.0. Raises SandboxError only."""
        solution = submission.files.get(SOLUTION, "")
        if not solution.strip():
            return Score(0.0, {"reason": f"there is no {SOLUTION}, or it is empty"})
        nonce = secrets.token_hex(16)
        async with fresh() as sandbox:
            await sandbox.write_file(f"{_FOLDER}/runner.py", _RUNNER.encode())
            await sandbox.write_file(f"{_FOLDER}/checks.json", self._checks(solution))
            result = await sandbox.exec(
                ["python3", f"{_FOLDER}/runner.py"], timeout_s=timeout_s * 0.8, stdin=f"{nonce}\n".encode()
            )
        return _score(result, nonce)

    def _checks(self, solution: str) -> bytes:
        parts = {
            "prompt": self._prompt,
            "solution": solution,
            "test": self._test,
            "entry_point": self._entry_point,
        }
        return json.dumps(parts).encode()


def _score(result: ExecResult, nonce: str) -> Score:
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    passed = result.code == 0 and not result.timed_out and bool(lines) and lines[-1].strip() == nonce
    return Score(float(passed), {"passed": passed, **ending(result)})


def ending(result: ExecResult) -> dict[str, Any]:
    """How a command ended, for the details of a score: exit code, time limit, last lines."""
    output = (result.stdout + b"\n" + result.stderr).decode("utf-8", "replace")
    lines = [line for line in output.splitlines() if line.strip()]
    return {
        "exit_code": result.code,
        "timed_out": result.timed_out,
        "last_lines": [line[:300] for line in lines[-_LAST_LINES:]],
    }

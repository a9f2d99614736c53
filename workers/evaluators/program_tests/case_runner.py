"""Runs a program on the input of one test, in a sandbox without data of any other test."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import replace
from typing import Any

from farm.records.request import SandboxLimits
from workers.evaluators.node_conditions import observed
from workers.evaluators.process_end import ProcessEnd
from workers.evaluators.program_source import source_of
from workers.evaluators.program_tests.form_rules import CallTest, HiddenTests, StreamTest, form_rule
from workers.evaluators.program_tests.program_supervisor import COMPUTED, LEFT_BEHIND, SLEPT, WAITED
from workers.evaluators.program_values import NotData, packed, unpacked
from workers.plugins.interfaces import ExecResult, Sandbox

MAX_OUTPUT = 8_000_000
"""Maximum bytes of output of one test; above it the test fails."""
_FOLDER = "/tmp/program"  # noqa: S108  (of the sandbox, which is not shared)
_WALL_FACTOR = 4.0
_MIN_WALL_S = 20.0
"""A program's limit is CPU time; by the clock it gets more, as the machine may be busy."""
_GRACE_PERIOD_S = 15.0
"""Seconds in addition to a test's time in which the supervisor, which enforces it, may end the program."""


class CaseRunner:
    """Runs a program once for each test."""

    def __init__(self, sandbox: Sandbox, tests: HiddenTests) -> None:
        self._sandbox = sandbox
        self._imports = form_rule(tests.rule).imports if tests.rule else ""
        self._tests = tests
        self.wall_s = max(_MIN_WALL_S, _WALL_FACTOR * tests.time_s)
        cpu_s = max(1, math.ceil(tests.time_s))
        self._limits = SandboxLimits(cpu_s=cpu_s, memory_mb=tests.memory_mb, file_mb=64)
        supervisor = source_of("program_tests.descendants", "program_tests.program_supervisor")
        self._supervisor = ["python3", "-I", "-B", "-c", supervisor, str(self.wall_s), str(tests.time_s)]

    async def run(self, program: str, test: StreamTest | CallTest) -> tuple[ExecResult, ProcessEnd]:
        """Run a program on the input of a test. Raises SandboxError; ToolError if files cannot be written any more."""
        folder = _new_folder()
        path = f"{folder}/solution.py"
        await self._sandbox.write_file(path, program.encode("utf-8", "replace"))
        if isinstance(test, CallTest):
            source = source_of("program_values", "program_tests.usual_names", "program_tests.function_call")
            command = ["python3", "-B", "-c", source, path, self._tests.function, self._imports]
            return await self._exec(command, json.dumps(packed(list(test.arguments))), folder)
        if self._imports:
            source = source_of("program_tests.usual_names", "program_tests.stream_program")
            return await self._exec(["python3", "-B", "-c", source, path, self._imports], test.stdin, folder)
        return await self._exec(["python3", "-B", path], test.stdin, folder)

    async def check(self, checker: str, test: StreamTest, output: str) -> tuple[ExecResult, ProcessEnd]:
        """Run the row's checker on an output; exit code 0 accepts it. It gets `{input, output, expected}` as JSON."""
        folder = _new_folder()
        await self._sandbox.write_file(f"{folder}/checker.py", checker.encode())
        content = json.dumps({"input": test.stdin, "output": output, "expected": test.expected})
        return await self._exec(["python3", "-I", "-B", f"{folder}/checker.py"], content, folder)

    async def _exec(self, command: list[str], stdin: str, folder: str) -> tuple[ExecResult, ProcessEnd]:
        async with observed() as conditions:
            result = await self._sandbox.exec(
                [*self._supervisor, *command],
                timeout_s=self.wall_s + _GRACE_PERIOD_S,
                stdin=stdin.encode("utf-8", "replace"),
                cwd=folder,
                limits=self._limits,
            )
        if result.code not in (COMPUTED, WAITED, SLEPT):
            return result, ProcessEnd.of(result, self.wall_s, conditions)
        end = ProcessEnd(
            None,
            timed_out=True,
            limit_s=self.wall_s,
            limit=result.limit,
            cpu_limit_s=self._tests.time_s,
            cpu_s=self._tests.time_s if result.code == COMPUTED else 0.0,
            waited_s=self.wall_s if result.code == WAITED else 0.0,
            conditions=conditions,
        )
        return replace(result, code=None, timed_out=True), end


def _new_folder() -> str:
    """Return a folder name that no earlier test can have prepared or occupied."""
    return f"{_FOLDER}-{secrets.token_hex(8)}"


def left_behind(result: ExecResult) -> bool:
    """Return whether processes of a run may still live: its supervisor says so, or was itself ended."""
    return result.code in (LEFT_BEHIND, 137) or (result.code or 0) < 0


def output_of(result: ExecResult) -> str | None:
    """Return the output of a run as text; None if it is too large."""
    return result.stdout.decode("utf-8", "replace") if len(result.stdout) <= MAX_OUTPUT else None


def value_of(result: ExecResult) -> Any:
    """Return the value of a function. Raises NotData for an invalid output."""
    try:
        return unpacked(json.loads(result.stdout[: MAX_OUTPUT + 1]))
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotData(f"no value: {type(error).__name__}") from None

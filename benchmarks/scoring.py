"""Cost of scoring: an answer by its verifier in a separate process, a symbolic one, and a program with its judge.

Each is compared, in the same run, with its cost without isolation: the verifier called directly in this process, the
symbolic one without a time limit; and the program with its checks in one interpreter, as in HumanEval's own script.
Programs run in a sandbox that is already started, so that only the processes are measured; a real evaluation starts one
for each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.problems import humaneval_problems, math_problems
from farm.records.request import SandboxSpec
from testkit.report import Report, options
from testkit.scratch_folder import conditions, scratch
from workers.evaluators.answer import AnswerEvaluator
from workers.evaluators.grader import LIBRARIES
from workers.evaluators.grading import Grader, shared_grader
from workers.evaluators.programs import ProgramEvaluator
from workers.plugins import registry
from workers.plugins.interfaces import Sandbox, Submission
from workers.plugins.registry import sandbox as provider

_SCORE_S = 120.0
_N_AT_ONCE = 16
_SYMBOLS = "a^2+2ab+b^2", "(a+b)^2"
"""A reference answer, and an equal one."""


def main() -> None:
    result = options(__doc__)
    with scratch():
        report = Report(f"scoring ({conditions()})")
        asyncio.run(_measure(report, result))
    report.show(result.json)


async def _measure(report: Report, args: argparse.Namespace) -> None:
    await _answers(report, 100 if args.quick else 500)
    await _symbols(report, 20 if args.quick else 100)
    await _programs(report, 20 if args.quick else 100)


async def _answers(report: Report, n: int) -> None:
    entries = [problem.fields for problem in math_problems(per_family=1)]
    grader = Grader()

    @asynccontextmanager
    async def none(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        raise RuntimeError("answers are scored without a sandbox")
        yield

    async def score(index: int) -> None:
        fields = entries[index % len(entries)]
        evaluator = AnswerEvaluator(fields["family"], fields, grader=grader)
        assert (await evaluator.evaluate(Submission(answer=fields["answer"]), none, _SCORE_S)).value == 1.0

    try:
        await asyncio.gather(*map(score, range(len(entries))))
        times = await _timed(score, n)
        started = time.perf_counter()
        for first in range(0, n, _N_AT_ONCE):
            await asyncio.gather(*map(score, range(first, first + _N_AT_ONCE)))
        rate = n / (time.perf_counter() - started)
    finally:
        await grader.aclose()
    direct_ms = _directly(entries, n)
    report.times("a math answer, one after another", times, verifier_called_directly_ms=direct_ms)
    report.add(f"math answers, {_N_AT_ONCE} at once", rate, "/s", verifier_called_directly=1000 / direct_ms)


async def _symbols(report: Report, n: int) -> None:
    """Of an answer that only algebra shows to be right."""
    kind = registry.handler("answer")
    handler = kind(kind.instance_type.model_validate({"question": "Expand or factor.", "gold": _SYMBOLS[0]}))

    @asynccontextmanager
    async def none(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        raise RuntimeError("answers are scored without a sandbox")
        yield

    async def score(_: int) -> None:
        answer = Submission(answer=f"\\boxed{{{_SYMBOLS[1]}}}")
        assert (await handler.evaluator().evaluate(answer, none, _SCORE_S)).value == 1.0

    try:
        await score(0)
        began = _busy_s()
        times = await _timed(score, n)
        cpu_ms = (_busy_s() - began) / n * 1000
    finally:
        await asyncio.gather(*(shared_grader(library).aclose() for library in LIBRARIES))
    report.times("a symbolic answer", times, cpu_of_the_machine_ms=cpu_ms, verifier_called_directly_ms=_algebra_ms(n))


def _algebra_ms(n: int) -> float:
    from math_verify import parse, verify

    times = []
    for _ in range(n):
        started = time.perf_counter()
        gold, answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in _SYMBOLS)
        assert verify(gold, answer, timeout_seconds=None)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def _busy_s() -> float:
    """Return the machine's CPU seconds: processes that have ended are in no other count."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _directly(entries: list[dict[str, Any]], n: int) -> float:
    from reasoning_gym.factory import get_score_answer_fn

    verifiers = {fields["family"]: get_score_answer_fn(fields["family"]) for fields in entries}
    times = []
    for index in range(n):
        fields = entries[index % len(entries)]
        started = time.perf_counter()
        verifiers[fields["family"]](fields["answer"], fields)
        times.append(time.perf_counter() - started)
    return statistics.fmean(times) * 1000


async def _programs(report: Report, n: int) -> None:
    problems = [problem.fields for problem in humaneval_problems(n)]
    kind = "namespace" if not provider("namespace").missing() else "singularity"
    sandbox = await provider(kind).start("benchmark-scoring", SandboxSpec())

    @asynccontextmanager
    async def there(*_: object, **__: object) -> AsyncIterator[Sandbox]:
        yield sandbox

    async def score(index: int) -> None:
        fields = problems[index % len(problems)]
        evaluator = ProgramEvaluator(fields["prompt"], fields["test"], fields["entry_point"])
        solution = fields["prompt"] + fields["canonical_solution"]
        result = await evaluator.evaluate(Submission(files={"solution.py": solution}), there, _SCORE_S)
        assert result.value == 1.0, result

    async def together(index: int) -> None:
        fields = problems[index % len(problems)]
        parts = (fields["prompt"], fields["canonical_solution"], fields["test"], f"check({fields['entry_point']})")
        source = parts[0] + "\n".join(parts[1:])
        await sandbox.write_file("/tmp/checks/together.py", source.encode())
        assert (await sandbox.exec(["python3", "/tmp/checks/together.py"], timeout_s=_SCORE_S)).code == 0

    try:
        await score(0)
        await together(0)
        one_interpreter_ms = statistics.median(await _timed(together, n)) * 1000
        times = await _timed(score, n)
    finally:
        await sandbox.stop()
    report.times(f"a program and its judge, {kind}", times, in_one_interpreter_ms=one_interpreter_ms)


async def _timed(act: Callable[[int], Awaitable[None]], n: int) -> list[float]:
    times = []
    for index in range(n):
        started = time.perf_counter()
        await act(index)
        times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    main()

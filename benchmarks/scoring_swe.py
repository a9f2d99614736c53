"""Cost of a trustworthy score of a patch, compared with only the tests, one after the other in one run.

Only the tests means a fresh sandbox, both patches and the instance's command: the minimum cost of scoring in a sandbox.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from examples.problems import swe_problems
from testkit.report import Report, options
from testkit.scratch_folder import conditions, scratch
from workers.evaluators.patches import GIT_ENV, PATCH, PatchedTree, script
from workers.evaluators.tests import MAX_KEPT_COPIES
from workers.handlers.swe import SweHandler, SweInstance
from workers.plugins.interfaces import Sandbox, Submission
from workers.plugins.registry import sandbox as provider

_TREE, _FOLDER, _LIMIT_S = "/workspace", "/tmp/ours", 600.0


@asynccontextmanager
async def fresh(instance: SweInstance) -> AsyncIterator[Sandbox]:
    sandbox = await provider("namespace").start(f"bench-{uuid.uuid4().hex[:12]}", instance.spec())
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def run_tests(instance: SweInstance) -> None:
    """Apply both patches and run the command; everything must pass."""
    command = instance.environment.test_cmd
    env = {**GIT_ENV, "PYTHONPATH": f"{_TREE}/{instance.environment.pythonpath}", "PYTHONDONTWRITEBYTECODE": "1"}
    async with fresh(instance) as sandbox:
        await sandbox.write_file("/tmp/model.patch", (instance.patch or "").encode())
        await sandbox.write_file("/tmp/test.patch", instance.test_patch.encode())
        script = f"git apply /tmp/model.patch /tmp/test.patch && {command}"
        result = await sandbox.exec(["bash", "-c", script], timeout_s=_LIMIT_S, env=env, cwd=_TREE)
        assert result.code == 0, result


async def scored(instance: SweInstance, patch: str, value: float) -> None:
    evaluator = SweHandler(instance).evaluator()
    submission = Submission(files={PATCH: patch})
    score = await evaluator.evaluate(submission, lambda *_, **__: fresh(instance), _LIMIT_S)
    assert score.value == value, score


def _unreadable(patch: str) -> str:
    """Return the patch with a line that is not Python, so that no test can be collected."""
    lines = patch.split("\n")
    at = next(n for n, line in enumerate(lines) if line.startswith("+") and not line.startswith("+++"))
    return "\n".join([*lines[:at], "+(((", *lines[at + 1 :]])


async def without_outcomes(instance: SweInstance, times: dict[str, list[float]]) -> None:
    """Score a patch that produces no outcomes, as the first of its instance and once more."""
    # for the evaluator, another command means another instance
    environment = instance.environment
    command = environment.test_cmd + " " * (len(times.get("without_outcomes", ())) + 1)
    first = instance.model_copy(update={"environment": environment.model_copy(update={"test_cmd": command})})
    for name in ("without_outcomes_and_control", "without_outcomes"):
        started = time.perf_counter()
        await scored(first, _unreadable(instance.patch or ""), 0.0)
        times.setdefault(name, []).append(time.perf_counter() - started)


async def planted(instance: SweInstance, copied: list[str]) -> float:
    """Return the time of the tests with the right patch, with canaries and copies among them."""
    files = [test.partition("::")[0] for test in (*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS)]
    env = {**GIT_ENV, "PYTHONPATH": f"{_TREE}/{instance.environment.pythonpath}", "PYTHONDONTWRITEBYTECODE": "1"}
    async with fresh(instance) as sandbox:
        await sandbox.write_file("/tmp/model.patch", (instance.patch or "").encode())
        await sandbox.write_file("/tmp/test.patch", instance.test_patch.encode())
        both = "git apply /tmp/model.patch /tmp/test.patch"
        await sandbox.exec(["bash", "-c", both], timeout_s=_LIMIT_S, env=GIT_ENV, cwd=_TREE)
        tree = PatchedTree(sandbox, _TREE, _FOLDER, _LIMIT_S, instance.environment.pythonpath)
        await tree.plant(files, copied)
        started = time.perf_counter()
        # as set by the evaluator's plug-in
        command = f"{instance.environment.test_cmd} --tb=no"
        result = await sandbox.exec(["bash", "-c", command], timeout_s=_LIMIT_S, env=env, cwd=_TREE)
        # canaries and copies fail
        assert result.code == 1, result
        return time.perf_counter() - started


async def parts(instance: SweInstance, times: dict[str, list[float]]) -> None:
    """Measure the additional parts separately."""
    files = [test.partition("::")[0] for test in instance.FAIL_TO_PASS]
    async with fresh(instance) as sandbox:
        await sandbox.exec(["bash", "-c", script("commit_baseline")], timeout_s=_LIMIT_S, env=GIT_ENV, cwd=_TREE)
        tree = PatchedTree(sandbox, _TREE, _FOLDER, _LIMIT_S, instance.environment.pythonpath)
        for name, part in (
            ("mark_the_clean_tree", tree.baseline),
            ("see_what_python_finds", tree.survey),
            ("apply_the_patch", lambda: tree.apply_policy((instance.patch or "").encode())),
            ("restore_and_apply_the_tests", lambda: tree.apply_tests(instance.test_patch, files)),
            ("plant_canaries_and_copies", lambda: tree.plant(files, instance.FAIL_TO_PASS)),
        ):
            started = time.perf_counter()
            await part()
            times.setdefault(name, []).append(time.perf_counter() - started)


async def measure(report: Report, rounds: int) -> None:
    instance = SweInstance.model_validate(swe_problems(1)[0].fields)
    await run_tests(instance)
    times: dict[str, list[float]] = {"tests_alone": [], "score": []}
    for _ in range(rounds):
        for name, run in (
            ("tests_alone", run_tests(instance)),
            ("score", scored(instance, instance.patch or "", 1.0)),
        ):
            started = time.perf_counter()
            await run
            times[name].append(time.perf_counter() - started)
        await without_outcomes(instance, times)
        await parts(instance, times)
        fixed = dict.fromkeys(test.partition("[")[0] for test in instance.FAIL_TO_PASS)
        kept = {test.partition("[")[0] for test in instance.PASS_TO_PASS} - fixed.keys()
        copied = [*fixed, *sorted(kept)[:MAX_KEPT_COPIES]]
        for name, tests in (("run_with_canaries", []), ("run_with_canaries_and_copies", copied)):
            times.setdefault(name, []).append(await planted(instance, tests))
    tests_only = report.times("tests_alone", times.pop("tests_alone"))
    report.times("score", times.pop("score"), tests_alone=tests_only)
    for name, seconds in times.items():
        report.times(name, seconds)


def main() -> None:
    result = options(__doc__)
    report = Report(f"Scores of patches, {conditions()}")
    with scratch():
        asyncio.run(measure(report, 5 if result.quick else 20))
    report.show(result.json)


if __name__ == "__main__":
    main()

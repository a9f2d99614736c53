"""Attribution of failures from a lack of resources: to the node, which never gives a score, or to the policy."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from farm.errors import EngineError, EvaluatorError, HandlerError, RolloutError, SandboxError
from farm.records.request import BatchSettings, Limits, SandboxLimits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.trajectory import ModelCall
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import farm_folder, until
from workers.config import own_config
from workers.plugins.interfaces import Artefact, Completion
from workers.sandboxes import shortage
from workers.sandboxes.diagnosis import broken_from_within
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox import NodeSandbox
from workers.stages.node_shortage import healthy_node
from workers.stages.run_stage import RunResult
from workers.stages.stage_functions import evaluate, init, run
from workers.stages.stage_job import StageJob, resolve_problem
from workers.testing.fakes import ScriptedPolicy, calling

N_AT_ONCE = 6
_MAX_RUNS = 8
PROBLEMS = [
    json.loads(line)
    for line in gzip.decompress(
        (Path(__file__).parents[3] / "examples/data/humaneval.jsonl.gz").read_bytes()
    ).splitlines()[: 2 * N_AT_ONCE]
]
SUBMIT = calling(("submit", {}))


def bash(command: str) -> Completion:
    return calling(("bash", {"command": command}))


def solving(problem: dict[str, str]) -> Completion:
    solution = problem["prompt"] + problem["canonical_solution"]
    return bash(f"cat >/workspace/solution.py <<'END_OF_FILE'\n{solution}\nEND_OF_FILE")


async def record(call: ModelCall) -> None:
    pass


async def keep(index: int, artefact: Artefact) -> str:
    return ""


def job_of(problem: dict[str, str], number: int = 0, **limits: Any) -> StageJob:
    return StageJob(
        rollout_id=f"r{number}",
        attempt=1,
        sample_index=0,
        data_source="code",
        fields=problem,
        batch=BatchSettings(limits=Limits(**limits)),
        sandbox_kind="namespace",
    )


async def run_job(job: StageJob, *script: Completion) -> RunResult:
    problem = resolve_problem(job)
    await init(problem)
    return await run(problem, ScriptedPolicy(*script, SUBMIT), record, keep)


@contextmanager
def small_scratch(options: str) -> Iterator[Path]:
    """Yield a scratch folder on a separate disk."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    with farm_folder() as folder, farm_in(folder), pytest.MonkeyPatch.context() as patch:
        scratch = folder / "small"
        scratch.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=711", "tmpfs", scratch], check=True)
        patch.setenv("FARM_SCRATCH", str(scratch))
        settings.cache_clear()
        try:
            yield scratch
        finally:
            subprocess.run(["umount", "-l", scratch], check=True)
            remove(folder)


class GatedPolicy(ScriptedPolicy):
    """Waits for an event before each of its turns; signals at a barrier that it waits."""

    def __init__(self, reached: Sequence[asyncio.Semaphore], gates: Sequence[asyncio.Event], *script: Completion):
        super().__init__(*script)
        self._gates = iter(zip(reached, gates, strict=True))

    async def complete(self, *args: Any, **more: Any) -> Completion:
        if step := next(self._gates, None):
            step[0].release()
            await step[1].wait()
        return await super().complete(*args, **more)


def fill(scratch: Path, what: str) -> None:
    """Use up the disk's bytes or inodes."""
    with suppress(OSError):
        if what == "bytes":
            with (scratch / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
        for number in range(100_000):
            (scratch / f"filler{number}").touch()


def empty(scratch: Path) -> None:
    for path in scratch.glob("filler*"):
        path.unlink()


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_right_solution_never_scores_zero_on_a_full_disk(what: str) -> None:
    """12 rollouts, of which half write their solution while the disk is full; it is emptied before they submit."""

    async def rollout(number: int, steps: Sequence[asyncio.Semaphore], gates: Sequence[asyncio.Event]) -> float | str:
        problem = resolve_problem(job_of(PROBLEMS[number], number))
        try:
            await init(problem)
            # the shell is opened before the disk is full, as opening one would fail
            policy = GatedPolicy(steps, gates, bash("true"), solving(PROBLEMS[number]), SUBMIT)
            done = await run(problem, policy, record, keep)
            return (await evaluate(problem, done.submission))[0].value
        except RolloutError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            # no step waits for a rollout that has ended
            for step in steps:
                step.release()

    async def with_memory(number: int, *steps_and_gates: Any) -> float | str:
        """Run it, again as a farm does while another program uses up the node's memory."""
        for _ in range(_MAX_RUNS - 1):
            result = await rollout(number, *steps_and_gates)
            if "no memory left" not in str(result):
                return result
        return await rollout(number, *steps_and_gates)

    async def all_of_them(scratch: Path) -> list[float | str]:
        steps, gates = [asyncio.Semaphore(0) for _ in range(3)], [asyncio.Event() for _ in range(3)]
        running = [asyncio.create_task(rollout(number, steps, gates)) for number in range(N_AT_ONCE)]
        gates[0].set()
        for _ in running:
            await steps[1].acquire()
        await asyncio.to_thread(fill, scratch, what)
        gates[1].set()
        for _ in running:
            await steps[2].acquire()
        await asyncio.to_thread(empty, scratch)
        gates[2].set()
        return await asyncio.gather(
            *running, *(with_memory(number, steps, gates) for number in range(N_AT_ONCE, 2 * N_AT_ONCE))
        )

    with small_scratch("size=120m" if what == "bytes" else "size=1g,nr_inodes=20k") as scratch:
        result = asyncio.run(all_of_them(scratch))
    assert all(str(each).startswith("SandboxError") and "disk is full" in str(each) for each in result[:N_AT_ONCE]), (
        result
    )
    assert result[N_AT_ONCE:] == [1.0] * N_AT_ONCE


def test_sandbox_at_its_own_disk_limit_is_charged_to_the_policy() -> None:
    with small_scratch("size=120m"), shortage.watched(sandbox_config()) as life:
        life.on_disk = True
        (settings().scratch / "filler").write_bytes(bytes(118 << 20))
        assert "disk is full" in life.reason()
        life.excuse("disk limit of 100 MB reached")
        assert life.reason() == ""


def test_full_disk_is_ignored_when_the_rollout_does_not_use_it() -> None:
    with small_scratch("size=120m"), shortage.watched(sandbox_config()) as life:
        (settings().scratch / "filler").write_bytes(bytes(118 << 20))
        assert life.reason() == ""


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (OSError(errno.EMFILE, "too many"), EvaluatorError),
        (OSError(errno.ENFILE, "too many"), EvaluatorError),
        (OSError(errno.ENOSPC, "full"), EvaluatorError),
        (OSError(errno.EDQUOT, "full"), EvaluatorError),
        (BlockingIOError(errno.EAGAIN, "no process"), EvaluatorError),
        # an oversized request gets it, too
        (MemoryError(), MemoryError),
        (RuntimeError("can't start new thread"), EvaluatorError),
        (RuntimeError("something else"), RuntimeError),
        (OSError(errno.ENOENT, "missing"), OSError),
        (HandlerError("an own one"), HandlerError),
    ],
)
def test_call_that_lacks_resources_is_charged_to_the_node(error: Exception, becomes: type[Exception]) -> None:
    async def scored(given: Exception) -> None:
        async with healthy_node(own_config().sandboxes, "r1", "scoring", EvaluatorError):
            raise given

    with pytest.raises(becomes):
        asyncio.run(scored(error))
    wrapped = HandlerError("it broke")
    wrapped.__cause__ = error
    with pytest.raises(EvaluatorError if becomes is EvaluatorError else HandlerError):
        asyncio.run(scored(wrapped))
    engine = EngineError("away")
    engine.__cause__ = error
    with pytest.raises(EngineError):
        asyncio.run(scored(engine))


def meminfo(**kilobytes: int) -> str:
    result = {
        "MemTotal": 8 << 20,
        "MemAvailable": 4 << 20,
        "SwapFree": 0,
        "CommitLimit": 4 << 20,
        "Committed_AS": 1 << 20,
    }
    return "".join(f"{name}:    {value} kB\n" for name, value in (result | kilobytes).items()) + "HugePages_Total:  0\n"


@pytest.mark.parametrize(
    ("shown", "strict", "short"),
    [
        (meminfo(), True, False),
        (meminfo(MemAvailable=30 << 10), False, True),
        (meminfo(MemAvailable=30 << 10, SwapFree=1 << 20), False, False),
        (meminfo(MemTotal=256 << 10, MemAvailable=30 << 10), False, False),
        (meminfo(Committed_AS=(4 << 20) - 1000), True, True),
        (meminfo(Committed_AS=5 << 20), True, True),
        (meminfo(Committed_AS=5 << 20), False, False),
    ],
)
def test_memory_shortage_is_detected_from_meminfo(shown: str, strict: bool, short: bool) -> None:
    assert shortage.used_up(shown, strict=strict) is short


def test_memory_error_on_a_node_without_memory_is_a_shortage() -> None:
    """Runs in a separate process, which may take no more memory than it has."""
    code = (
        "import resource as r; from pathlib import Path; from workers.sandboxes.shortage import exhausted\n"
        "assert not exhausted(MemoryError())\n"
        "n = int(Path('/proc/self/statm').read_text().split()[0]) * r.getpagesize() + (1 << 18)\n"
        "r.setrlimit(r.RLIMIT_AS, (n, r.RLIM_INFINITY))\n"
        "assert 'no memory left' in exhausted(MemoryError())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    if missing := NamespaceProvider().missing():
        absent(missing)
    with farm_folder() as folder, farm_in(folder):
        yield folder
        remove(folder)


SABOTAGE = {
    "kills all": "kill -9 -1",
    "stops the first process": "kill -STOP 1; kill -TSTP 1",
    "signals the first process": "for n in {1..64}; do kill -$n 1; done 2>/dev/null",
    "removes all": "rm -rf / 2>/dev/null",
    "a pipe instead of the file": "rm -f /workspace/solution.py; mkfifo /workspace/solution.py",
    "a folder instead of the file": "rm -f /workspace/solution.py; mkdir /workspace/solution.py",
    "a link in a circle": "ln -sfn solution.py /workspace/solution.py",
    "no working folder": "cd /; rm -rf /workspace; ln -s /nowhere /workspace",
    "a huge file": "truncate -s 90G /workspace/solution.py; head -c 90M /dev/zero >/workspace/solution.py",
    "no rights": "chmod 000 /workspace /tmp / 2>/dev/null",
    "no temporary folder": "rm -rf /tmp /var/tmp 2>/dev/null; touch /tmp",
    "processes that ignore signals": "trap '' 1 2 15; for n in {1..600}; do sleep 1000 & done 2>/dev/null; disown -a",
    "a fork bomb": "f() { f | f & }; f",
    "shared memory full": "head -c 1G /dev/zero >/dev/shm/x",
    "descriptors of the first process": "for n in /proc/1/fd/*; do echo x >$n; exec 9<$n; done 2>/dev/null",
    "limits of the first process": "prlimit --pid 1 --nofile=1:1 --data=1:1 --stack=1:1 --as=1:1 2>/dev/null",
    "memory of the first process": "echo x >/proc/1/mem; echo 1000 >/proc/1/oom_score_adj; true",
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_policy_that_damages_its_sandbox_scores_zero(name: str, home: Path) -> None:
    async def scored() -> tuple[Outcome, float]:
        job = job_of(PROBLEMS[0], tool_s=30)
        done = await run_job(job, bash(SABOTAGE[name]), bash("echo next"))
        return done.outcome, (await evaluate(resolve_problem(job), done.submission))[0].value

    assert asyncio.run(scored()) in {(Outcome.SUBMITTED, 0.0), (Outcome.INVALID_ACTION, 0.0)}


async def diagnosed(sandbox: NodeSandbox, provider: NamespaceProvider, spec: SandboxSpec, *, well: bool) -> bool:
    @asynccontextmanager
    async def fresh(*_: object, **__: object) -> AsyncIterator[NodeSandbox]:
        if not well:
            raise SandboxError("the node starts none")
        other = await provider.start(f"{sandbox.sandbox_id}.fresh", spec)
        try:
            yield other
        finally:
            await other.stop()

    return await broken_from_within(sandbox, fresh, kernel=False)


@pytest.mark.parametrize(
    ("done", "well", "theirs"),
    [
        ("nothing", True, False),
        ("no bash", True, True),
        ("no bash", False, False),
        ("bash that fails", True, True),
        ("limit", True, True),
        ("killed from outside", True, False),
        ("stopped", True, False),
    ],
)
def test_failing_sandbox_is_compared_with_a_fresh_one(done: str, well: bool, theirs: bool, home: Path) -> None:
    provider = NamespaceProvider()

    async def tried() -> bool:
        spec = SandboxSpec(limits=SandboxLimits(n_processes=40))
        sandbox = await provider.start(f"d{abs(hash((done, well)))}", spec)
        try:
            if done == "no bash":
                sandbox._variables["PATH"] = "/nowhere"
            elif done == "bash that fails":
                await sandbox.write_file("/workspace/bash", b"#!/bin/sh\nexit 3\n")
                await sandbox.exec(["chmod", "755", "/workspace/bash"], timeout_s=10)
                sandbox._variables["PATH"] = "/workspace"
            elif done == "limit":
                bomb = "for n in {1..100}; do sleep 100 & done 2>/dev/null"
                await sandbox.exec(["bash", "-c", bomb], timeout_s=10)
                await asyncio.to_thread(until, lambda: bool(sandbox.limits_reached()), "a limit is reached")
            elif done == "killed from outside":
                os.kill(sandbox._record.first.pid, 9)
                await asyncio.to_thread(until, lambda: not sandbox.alive(), "it has ended")
            elif done == "stopped":
                await sandbox.stop()
            return await diagnosed(sandbox, provider, spec, well=well)
        finally:
            await sandbox.stop()

    assert asyncio.run(tried()) is theirs

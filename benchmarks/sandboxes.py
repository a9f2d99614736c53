"""Cost of a sandbox: time to ready, idle memory, time to stop; how many at once; leftovers.

Measured with a small image, a .sif that is unpacked in the farm's cache, as after its first sandbox. `cold`: started on
request, by Apptainer and by namespaces only. `warm`: taken from the warm pool, of either kind. `forked`: copied from
files that were prepared once for a group, compared with preparing them for each. For comparison, as the same user:
`instance start` of the container runtime, with the same isolation but without a writable layer, from the unpacked image
(an image file is mounted by FUSE, where that is allowed).

Memory is the sum of proportional set sizes of all processes of the sandboxes, including their monitors.

In the cycles, sandboxes of both kinds are started, used, and stopped; or their monitor, their first process, the
process between the two or all of them are killed -9, also during their start; and whole workers are killed -9. Then the
node is swept. Leftovers are printed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.cycles import PROVIDERS, Cycles, killed_worker
from benchmarks.peers.raw_apptainer import RawApptainer
from farm.records.request import SandboxSpec
from testkit.leftovers import Leftovers
from testkit.processes import memory_of_all_mb, tree
from testkit.report import Report, options
from testkit.scratch_folder import conditions, sandbox_config, scratch, small_image
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.image import image as unpacked
from workers.sandboxes.launch_plan import prepare
from workers.sandboxes.lifecycle.reaper import sweep_all
from workers.sandboxes.provider import NodeSandboxProvider

WIDTH = 4
COLD_MS = {"singularity": 80, "namespace": 15}
WARM_MS = 2
MEMORY_MB = {"singularity": 7, "namespace": 1.5}
N_FILES = 30
_CALL_S = 60.0


def main() -> None:
    result = options(__doc__)
    with scratch() as folder:
        providers = {kind: provider() for kind, provider in PROVIDERS.items()}
        for kind, provider in providers.items():
            if missing := provider.missing():
                sys.exit(f"no {kind} sandboxes: {missing}")
        report = Report(f"sandboxes ({conditions()})")
        image = small_image()
        spec = SandboxSpec(image=str(image))
        prepare(sandbox_config(), spec)
        raw = _instances(folder, image, result)
        for kind, provider in providers.items():
            asyncio.run(_measure(report, kind, provider, spec, raw, result))  # type: ignore[arg-type]
        left = asyncio.run(_cycles(report, folder, list(providers), spec, result))
    report.show(result.json)
    sys.exit(1 if left else 0)


@dataclass(slots=True)
class Instances:
    """The runtime's own `instance start`, by source: the median in ms, and starts per second of many."""

    ms: dict[str, float] = field(default_factory=dict)
    per_s: dict[str, float] = field(default_factory=dict)


def _instances(folder: Path, image: Path, args: argparse.Namespace) -> Instances:
    """Measure it, from the unpacked image and from the file, where possible."""
    raw, instances = RawApptainer(folder / "raw"), Instances()
    n = 8 if args.quick else 40
    folder_of_image = unpacked(sandbox_config(), str(image)).folder
    for name, source in (("instance_start", folder_of_image), ("instance_start_from_file", image)):
        try:
            times = _blocking_times(partial(raw.start, source), 5 if args.quick else 20)
            raw.kill_all()
            started = time.perf_counter()
            with ThreadPoolExecutor(WIDTH) as pool:
                list(pool.map(raw.start, [source] * n))
            instances.per_s[name] = n / (time.perf_counter() - started)
            instances.ms[name] = statistics.median(times) * 1000
        except RuntimeError as error:
            print(f"{name} is left out: {str(error).strip()[-300:]}", file=sys.stderr)
        raw.kill_all()
    return instances


def _blocking_times(action: Callable[[], Any], n: int) -> list[float]:
    times = []
    for _ in range(n + 1):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times[1:]


async def _measure(
    report: Report,
    kind: str,
    provider: NodeSandboxProvider,
    spec: SandboxSpec,
    raw: Instances,
    args: argparse.Namespace,
) -> None:
    await _cold(report, kind, provider, spec, raw, 10 if args.quick else 60)
    await _warm(report, kind, provider, spec, 10 if args.quick else 60)
    await _forked(report, kind, provider, spec, 4 if args.quick else 30)
    await _many(report, kind, provider, spec, raw, 40 if args.quick else 200)


async def _start(provider: NodeSandboxProvider, spec: SandboxSpec) -> tuple[Sandbox, float]:
    """Return a sandbox, and the seconds until it was ready."""
    started = time.perf_counter()
    sandbox = await provider.start(f"benchmark-{uuid4().hex[:12]}", spec)
    return sandbox, time.perf_counter() - started


async def _timed(action: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await action
    return time.perf_counter() - started


async def _cold(
    report: Report, kind: str, provider: NodeSandboxProvider, spec: SandboxSpec, raw: Instances, n: int
) -> None:
    ready, first, stop = [], [], []
    for _ in range(n + 1):
        sandbox, ready_s = await _start(provider, spec)
        ready.append(ready_s)
        first.append(await _timed(sandbox.exec(["true"], timeout_s=_CALL_S)))
        stop.append(await _timed(sandbox.stop()))
    report.times(f"{kind}_cold", ready[1:], at_most=COLD_MS[kind], **raw.ms)
    report.times(f"{kind}_first_exec", first[1:])
    report.times(f"{kind}_stop", stop[1:])


async def _warm(report: Report, kind: str, provider: NodeSandboxProvider, spec: SandboxSpec, n: int) -> None:
    """Measure a start from the warm pool, which is filled first. The second figure includes the first command."""
    parts = prepare(sandbox_config(), spec)
    for _ in range(n):
        await asyncio.to_thread(provider.recipe(spec).fill_warm_pool, parts)
    times, answered, sandboxes = [], [], []
    for _ in range(n):
        sandbox, ready_s = await _start(provider, spec)
        times.append(ready_s)
        answered.append(ready_s + await _timed(sandbox.exec(["true"], timeout_s=_CALL_S)))
        sandboxes.append(sandbox)
    with_exec = statistics.median(answered) * 1000
    report.times(f"{kind}_warm", times, at_most=WARM_MS, with_a_first_exec=with_exec)
    await _all(lambda sandbox: sandbox.stop(), sandboxes)


async def _forked(report: Report, kind: str, provider: NodeSandboxProvider, spec: SandboxSpec, n: int) -> None:
    """Measure siblings that begin with the same files."""

    async def stage(sandbox: Sandbox) -> None:
        for number in range(N_FILES):
            await sandbox.write_file(f"/workspace/file-{number}", b"x" * 10_000)

    restarted, forked = [], []
    for number in range(n + 1):
        sandbox, ready_s = await _start(provider, spec)
        restarted.append(ready_s + await _timed(stage(sandbox)))
        await sandbox.stop()
        started = time.perf_counter()
        sandbox = await provider.start_prepared(f"sibling-{number}", spec, "benchmark", stage)
        forked.append(time.perf_counter() - started)
        assert len((await sandbox.exec(["ls", "/workspace"], timeout_s=_CALL_S)).stdout.split()) == N_FILES
        await sandbox.stop()
    report.times(
        f"{kind}_forked", forked[1:], start_and_prepare=statistics.median(restarted) * 1000, the_first=forked[0] * 1000
    )


async def _all(action: Callable[[Any], Awaitable[Any]], subjects: Sequence[Any]) -> list[Any]:
    """Run the action on all, `WIDTH` at a time, in order."""
    width = asyncio.Semaphore(WIDTH)

    async def one(subject: Any) -> Any:
        async with width:
            return await action(subject)

    return await asyncio.gather(*(one(subject) for subject in subjects))


async def _many(
    report: Report, kind: str, provider: NodeSandboxProvider, spec: SandboxSpec, raw: Instances, n: int
) -> None:
    """Measure n live sandboxes: the rate of starts, memory of each, number of working shells, the rate of stops."""
    before_mb = _memory_mb()
    started = time.perf_counter()
    sandboxes = [sandbox for sandbox, _ in await _all(lambda _: _start(provider, spec), range(n))]
    rate = n / (time.perf_counter() - started)
    report.add(f"{kind}_starts_per_s", rate, "1/s", **raw.per_s)
    for name, instances_per_s in raw.per_s.items():
        report.add(f"{kind}_starts_to_{name}", rate / instances_per_s, "times", at_least=2)
    idle_mb = _memory_mb() - before_mb
    shells = await _all(lambda sandbox: sandbox.open_shell(), sandboxes)
    started = time.perf_counter()
    answers = await asyncio.gather(*(shell.run(f"echo {number}", _CALL_S) for number, shell in enumerate(shells)))
    answered_s = time.perf_counter() - started
    n_right = sum(answer.output == f"{number}\n" for number, answer in enumerate(answers))
    with_shells_mb = _memory_mb() - before_mb
    report.add(f"{kind}_live_and_answering", n_right, "", at_least=n, all_answers_in_ms=answered_s * 1000)
    report.add(f"{kind}_memory_idle", idle_mb / n, "MB", at_most=MEMORY_MB[kind], with_a_shell=with_shells_mb / n)
    started = time.perf_counter()
    await _all(lambda sandbox: sandbox.stop(), sandboxes)
    report.add(f"{kind}_stops_per_s", n / (time.perf_counter() - started), "1/s")
    await _all(lambda shell: shell.close(), shells)


def _memory_mb() -> float:
    """Return the memory of all descendants of this process: the fork server, and the sandboxes with their monitors."""
    return memory_of_all_mb([pid for pid in tree(os.getpid()) if pid != os.getpid()])


async def _cycles(
    report: Report, folder: Path, kinds: list[str], spec: SandboxSpec, args: argparse.Namespace
) -> dict[str, list[str]]:
    """Count the leftovers of many sandboxes that ended in any way."""
    # permanent parts of this process exist from now on
    for kind in kinds:
        await Cycles(PROVIDERS[kind](), spec, 0).run(8)
    leftovers = Leftovers(folder)
    n = (40 if args.quick else 1000) // len(kinds)
    ended: Counter[str] = Counter()
    started = time.perf_counter()
    for seed, kind in enumerate(kinds, 1):
        cycles = Cycles(PROVIDERS[kind](), spec, seed)
        await cycles.run(n)
        ended += cycles.ended
        for number in range(1 if args.quick else 5):
            arguments = (kind, spec.image, 8 if args.quick else 10, number)
            ended["worker"] += await asyncio.to_thread(killed_worker, *arguments)
    elapsed_s = time.perf_counter() - started
    await asyncio.to_thread(sweep_all, sandbox_config())
    left = await asyncio.to_thread(leftovers.settled)
    for kind, names in left.items():
        for name in names:
            print(f"left: {kind}: {name}", file=sys.stderr)
    counts: dict[str, float] = dict(ended)
    report.add("cycles", ended.total(), "", in_s=elapsed_s, **counts)
    result: dict[str, float] = {kind: len(names) for kind, names in left.items()}
    report.add("left_after_the_sweep", sum(result.values()), "", at_most=0, **result)
    return {kind: names for kind, names in left.items() if names}


if __name__ == "__main__":
    main()

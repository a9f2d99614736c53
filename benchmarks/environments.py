"""Cost of environments with steps: a start, a rollout and a step, beside the package's own loop in one process.

reasoning-gym and an environment that only counts are played by the farm's servers in sandboxes, with the connections
that a worker has and no LLM. Beside them: the same calls of the same class in one process, without server and sandbox.
A cold start installs nothing: packages are installed before.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence

from farm.records.request import SandboxSpec
from testkit.place import conditions, scratch
from testkit.report import Report, options
from workers.environments.environment import Action, Begin, Episode, Step
from workers.environments.environment_program import EnvironmentProgram, environment_program
from workers.environments.environment_servers import EnvironmentServers
from workers.interfaces import SandboxProvider
from workers.registry import best_sandbox
from workers.registry import sandbox as provider_of

N_STEPS = 20
_STEP_S = 120.0
_ALONE = """
import sys, time
started = time.perf_counter()
import {imports}
from {module} import {name}
from workers.environments.environment import Action, Episode
imported = time.perf_counter() - started
started = time.perf_counter()
for seed in range({n}):
    environment = {name}(None)
    environment.reset(Episode(id={id!r}, seed=seed))
    for _ in range({n_steps}):
        environment.step(Action("<answer>1</answer>"))
    environment.close()
print(imported, (time.perf_counter() - started) / {n})
"""


class Counting:
    """Counts its steps, and does nothing else."""

    def __init__(self, ask: object) -> None:
        self._n = 0

    def reset(self, episode: Episode) -> Begin:
        return Begin([{"role": "user", "content": "Go on."}])

    def step(self, action: Action) -> Step:
        self._n += 1
        return Step([{"role": "user", "content": str(self._n)}], 0.1)

    def close(self) -> float | None:
        return None


def main() -> None:
    result = options(__doc__)
    with scratch():
        report = Report(f"environments ({conditions()})")
        asyncio.run(_measure(report, result))
    report.show(result.json)


async def _measure(report: Report, asked: argparse.Namespace) -> None:
    provider = provider_of(best_sandbox())
    counting = EnvironmentProgram.of("counting", Counting)
    n = 20 if asked.quick else 100
    await _one(report, provider, counting, "", n, N_STEPS)
    await _one(report, provider, environment_program("reasoning_gym"), "chain_sum", n, 1)


async def _one(
    report: Report, provider: SandboxProvider, program: EnvironmentProgram, episode_id: str, n: int, n_steps: int
) -> None:
    """Measure one environment: starts, rollouts one after another and at once."""
    await _installed(provider, program.spec())
    imported_s, alone_s = _alone(program, episode_id, n, n_steps)
    servers = EnvironmentServers()

    async def rollout(seed: int) -> None:
        connection = await servers.connect(program, provider)
        try:
            await connection.reset(Episode(id=episode_id, seed=seed), _STEP_S)
            for _ in range(n_steps):
                await connection.step(Action("<answer>1</answer>"), _STEP_S)
            await connection.finish(_STEP_S)
        finally:
            connection.drop()

    async def warm_start(seed: int) -> float:
        started = time.perf_counter()
        connection = await servers.connect(program, provider)
        await connection.reset(Episode(id=episode_id, seed=seed), _STEP_S)
        took = time.perf_counter() - started
        connection.drop()
        return took

    try:
        started = time.perf_counter()
        await warm_start(0)
        cold_s = time.perf_counter() - started
        report.add(f"{program.name}: cold start, with its sandbox", cold_s * 1000, "ms", import_alone=imported_s * 1000)
        report.times(f"{program.name}: warm start, reset done", [await warm_start(seed) for seed in range(n)])
        started = time.perf_counter()
        for seed in range(n):
            await rollout(seed)
        each_s = (time.perf_counter() - started) / n
        report.add(f"{program.name}: a rollout of {n_steps} steps", each_s * 1000, "ms", in_one_process=alone_s * 1000)
        started = time.perf_counter()
        for first in range(0, n, 16):
            await asyncio.gather(*map(rollout, range(first, first + 16)))
        rate = n_steps * len(range(0, n, 16)) * 16 / (time.perf_counter() - started)
        report.add(f"{program.name}: steps, 16 rollouts at once", rate, "/s", in_one_process=n_steps / alone_s)
    finally:
        await servers.aclose()


async def _installed(provider: SandboxProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.start("benchmark-environments", spec)
    await sandbox.stop()


def _alone(program: EnvironmentProgram, episode_id: str, n: int, n_steps: int) -> Sequence[float]:
    """Return the seconds of the imports, and of a rollout, in a fresh process of this machine's Python."""
    imports = [name for name in program.imports if not name.startswith("workers.")] or ["json"]
    source = _ALONE.format(
        imports=", ".join(imports),
        module=program.module,
        name=program.qualname,
        id=episode_id,
        n=n,
        n_steps=n_steps,
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return [float(each) for each in done.stdout.split()]


if __name__ == "__main__":
    main()

"""Cost of environments with steps: a start, a rollout and a step, compared with the package's own loop in one process.

reasoning-gym and the guessing game of `examples` run on the farm's servers in sandboxes, with a worker's connections
and no LLM; for comparison, the same calls of the same class in one process, without server and sandbox. The verdict of
the node's grader on an answer is compared with a direct call of the library's verifier, and a start in a shared server
with one in a sandbox of the rollout's own. Steps of GEM and TextArena, one rollout at a time, are compared with a loop
of only the packages' calls, in the Python of the same environment.
A cold start installs nothing: packages are installed before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from examples.environment.guessing_game import GuessingGame
from farm.records.request import SandboxSpec
from testkit.report import Report, options
from testkit.scratch_folder import conditions, sandbox_config, scratch
from workers.environments.environment import Action, Episode
from workers.environments.environment_program import EnvironmentProgram, environment_program
from workers.environments.environment_servers import EnvironmentServers
from workers.evaluators.answer import verified
from workers.plugins.interfaces import SandboxProvider
from workers.plugins.registry import best_sandbox
from workers.plugins.registry import sandbox as provider_of
from workers.sandboxes.images.environments import environment
from workers.sandboxes.images.image import image

N_STEPS = 20
_STEP_S = 120.0
_FAMILIES = ("gcd", "string_insertion", "simple_integration")
_IN_PROCESS = """
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

_OWN_LOOPS = {
    "gem": (
        "game:GuessTheNumber-v0-hard",
        """
import sys, types
sys.modules["pycosat"] = types.ModuleType("pycosat")
import gem
def run_episode(seed):
    environment = gem.make("game:GuessTheNumber-v0-hard")
    environment.reset(seed=seed)
    for n in range(1, N + 1):
        if any(environment.step(ACTION % (n, n))[2:4]):
            return n
    return N
""",
    ),
    "textarena": (
        "GuessTheNumber-v0-hardcore",
        """
import textarena
def run_episode(seed):
    environment = textarena.make("GuessTheNumber-v0-hardcore")
    environment.reset(num_players=1, seed=seed)
    for n in range(1, N + 1):
        environment.get_observation()
        if environment.step(ACTION % (n, n))[0]:
            return n
    return N
""",
    ),
}
"""For each environment: the id, and a function that makes at most N steps and returns their number."""
_TIMED = """
import contextlib, io, time
with contextlib.redirect_stdout(io.StringIO()):
    run_episode(0)
    started = time.perf_counter()
    n = sum(run_episode(seed) for seed in range({n}))
print(n / (time.perf_counter() - started))
"""
_ACTION = "I take [%d] and \\boxed{%d}."


def main() -> None:
    result = options(__doc__)
    with scratch():
        report = Report(f"environments ({conditions()})")
        asyncio.run(_measure(report, result))
    report.show(result.json)


async def _measure(report: Report, args: argparse.Namespace) -> None:
    provider = provider_of(best_sandbox())
    game = EnvironmentProgram.of("guessing_game", GuessingGame)
    n = 20 if args.quick else 100
    await _one(report, provider, game, "", n, N_STEPS)
    await _one(report, provider, environment_program("reasoning_gym"), "chain_sum", n, 1)
    for family in _FAMILIES:
        await _verdicts(report, family, n)
    for name in _OWN_LOOPS:
        await _load_on_own_loop(report, provider, environment_program(name), n)


async def _load_on_own_loop(report: Report, provider: SandboxProvider, program: EnvironmentProgram, n: int) -> None:
    """Measure steps of a package per second, with the farm and with the package's own loop."""
    episode_id, source = _OWN_LOOPS[program.name]
    await _installed(provider, program.spec())
    own_rate = _own_rate(program, source, n)
    servers = EnvironmentServers()
    took: list[float] = []
    spent_s = 0.0
    try:
        for seed in range(-1, n):
            connection = await servers.connect(program, provider)
            connection.verify = partial(verified, timeout_s=_STEP_S)
            started = time.perf_counter()
            await connection.reset(Episode(id=episode_id, seed=max(seed, 0)), _STEP_S)
            for taken in range(1, N_STEPS + 1):
                begun = time.perf_counter()
                step = await connection.step(Action(_ACTION % (taken, taken)), _STEP_S)
                took.append(time.perf_counter() - begun)
                if step.terminated or step.truncated:
                    break
            connection.drop()
            spent_s += time.perf_counter() - started
            if seed < 0:
                # the first episode has started the server
                took, spent_s = [], 0.0
    finally:
        await servers.aclose()
    rate = len(took) / spent_s
    title = f"{program.name} {episode_id}"
    report.add(f"{title}: steps, with starts", rate, "/s", its_own_loop=own_rate, ratio=rate / own_rate)
    report.times(f"{title}: a step", took, its_own_loop_with_starts=1000 / own_rate)


async def _verdicts(report: Report, family: str, n: int) -> None:
    """Measure verdicts on the reference answer, by the grader one after another, and by direct calls."""
    # imported here, as it takes a second
    from reasoning_gym import create_dataset

    dataset = create_dataset(family, size=1, seed=1)
    entry = json.loads(json.dumps(dataset[0]))
    took = []
    await verified(family, entry, {}, entry["answer"], _STEP_S)
    for _ in range(n):
        started = time.perf_counter()
        await verified(family, entry, {}, entry["answer"], _STEP_S)
        took.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(n):
        dataset.score_answer(entry["answer"], entry)
    direct_s = (time.perf_counter() - started) / n
    report.times(f"{family}: a verdict of the grader", took, direct_call=direct_s * 1000)


async def _one(
    report: Report, provider: SandboxProvider, program: EnvironmentProgram, episode_id: str, n: int, n_steps: int
) -> None:
    """Measure one environment: starts, rollouts one after another and concurrently."""
    await _installed(provider, program.spec())
    imported_s, in_process_s = _in_process(program, episode_id, n, n_steps)
    servers = EnvironmentServers()

    async def rollout(seed: int) -> None:
        connection = await servers.connect(program, provider)
        connection.verify = partial(verified, timeout_s=_STEP_S)
        try:
            await connection.reset(Episode(id=episode_id, seed=seed), _STEP_S)
            for _ in range(n_steps):
                await connection.step(Action("<answer>1</answer>"), _STEP_S)
            await connection.finish(_STEP_S)
        finally:
            connection.drop()

    async def start(seed: int, started_as: EnvironmentProgram = program) -> float:
        started = time.perf_counter()
        connection = await servers.connect(started_as, provider)
        await connection.reset(Episode(id=episode_id, seed=seed), _STEP_S)
        took = time.perf_counter() - started
        connection.drop()
        return took

    try:
        started = time.perf_counter()
        await start(0)
        cold_s = time.perf_counter() - started
        report.add(f"{program.name}: cold start, with its sandbox", cold_s * 1000, "ms", import_alone=imported_s * 1000)
        report.times(f"{program.name}: warm start, reset done", [await start(seed) for seed in range(n)])
        own = replace(program, shared=False)
        report.times(
            f"{program.name}: start in a sandbox of its own", [await start(seed, own) for seed in range(n // 10)]
        )
        started = time.perf_counter()
        for seed in range(n):
            await rollout(seed)
        each_s = (time.perf_counter() - started) / n
        report.add(
            f"{program.name}: a rollout of {n_steps} steps", each_s * 1000, "ms", in_one_process=in_process_s * 1000
        )
        started = time.perf_counter()
        for first in range(0, n, 16):
            await asyncio.gather(*map(rollout, range(first, first + 16)))
        rate = n_steps * len(range(0, n, 16)) * 16 / (time.perf_counter() - started)
        report.add(f"{program.name}: steps, 16 rollouts at once", rate, "/s", in_one_process=n_steps / in_process_s)
    finally:
        await servers.aclose()


def _own_rate(program: EnvironmentProgram, source: str, n: int) -> float:
    """Return the steps per second of a package's own loop, in a process of the environment's Python."""
    config = sandbox_config()
    folder = environment(
        config,
        program.spec().packages,
        image(config, program.image),
        without_dependencies=program.without_dependencies,
    ).binds[0][0]
    given = f"N, ACTION = {N_STEPS}, {_ACTION!r}\n{source}{_TIMED.format(n=n)}"
    # -P: nothing of this checkout is imported
    done = subprocess.run([f"{folder}/bin/python", "-P", "-c", given], capture_output=True, text=True, check=True)
    return float(done.stdout)


async def _installed(provider: SandboxProvider, spec: SandboxSpec) -> None:
    sandbox = await provider.start("benchmark-environments", spec)
    await sandbox.stop()


def _in_process(program: EnvironmentProgram, episode_id: str, n: int, n_steps: int) -> Sequence[float]:
    """Return the seconds of the imports, and of a rollout, in a fresh process of this machine's Python."""
    imports = [name for name in program.imports if not name.startswith("workers.")] or ["json"]
    source = _IN_PROCESS.format(
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

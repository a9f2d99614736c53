"""Promises about many at once: sandboxes, shells and starts that do not disturb each other."""

from __future__ import annotations

import asyncio
import secrets

from workers.interfaces import Sandbox
from workers.testing.promises import outside
from workers.testing.promises.expect import same
from workers.testing.promises.promise import promise
from workers.testing.promises.trial import Trial

_MANY = 20


@promise(time_s=180)
async def many_sandboxes_answer(trial: Trial) -> None:
    """Twenty sandboxes are started at once, each answers with what is its own, and all are stopped at once."""
    sandboxes = await asyncio.gather(*(trial.start(env={"NUMBER": str(n)}) for n in range(_MANY)))
    await asyncio.gather(*(one.write_file("own", f"{n} ".encode()) for n, one in enumerate(sandboxes)))
    answers = await asyncio.gather(*(trial.sh("cat own; echo $NUMBER", one, 60) for one in sandboxes))
    same(answers, [f"{n} {n}\n" for n in range(_MANY)], "what they answer")
    await asyncio.gather(*(one.stop() for one in sandboxes))
    left = outside.left_of(*(one.sandbox_id for one in sandboxes))
    assert not left, f"there is left: {'; '.join(left[:5])}"


@promise(time_s=120)
async def shells_of_many_sandboxes_run_side_by_side(trial: Trial) -> None:
    """Shells and kernels in several sandboxes, busy at the same time, each get their own output and keep state."""
    sandboxes = await asyncio.gather(*(trial.start() for _ in range(5)))
    shells = await asyncio.gather(*(trial.shell(one) for one in sandboxes))
    kernels = await asyncio.gather(*(trial.kernel(one) for one in sandboxes))
    for n, (shell, kernel) in enumerate(zip(shells, kernels, strict=True)):
        await asyncio.gather(shell.run(f"X={n}", 20), kernel.run(f"x = {n}", 20))
    for _ in range(5):
        said = await asyncio.gather(*(shell.run("seq 1000 >/dev/null; echo $X", 30) for shell in shells))
        same([result.output for result in said], [f"{n}\n" for n in range(5)], "what the shells say")
        shown = await asyncio.gather(*(kernel.run("print(x)", 30) for kernel in kernels))
        same([result.output for result in shown], [f"{n}\n" for n in range(5)], "what the kernels say")


@promise(time_s=180)
async def some_start_while_others_end(trial: Trial) -> None:
    """Starting, using and stopping sandboxes may overlap in any way."""

    async def live(n: int) -> None:
        one: Sandbox = await trial.start(env={"NUMBER": str(n)})
        await asyncio.sleep(secrets.randbelow(100) / 1000)
        same(await trial.sh("echo $NUMBER", one, 60), f"{n}\n", "what a sandbox says")
        await one.stop()

    await asyncio.gather(*(live(n) for n in range(_MANY)))

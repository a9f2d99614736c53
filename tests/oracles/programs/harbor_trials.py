"""Harbor's trials of tasks in the farm's sandboxes: `harbor_trials.py < TASKS`, JSON with folders by name.

Each is run by Harbor's own agents `oracle`, which runs the solution, and `nop`, which does nothing. The output has the
rewards of each, null if a trial gave none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

sys.path.insert(0, str(Path(__file__).parent))
AGENTS = ("oracle", "nop")
MAX_S = 300.0


async def rewards_of(folder: str, agent: str, place: Path) -> Any:
    config = TrialConfig.model_validate(
        {
            "task": {"path": folder},
            "trials_dir": place,
            "agent": {"name": agent},
            "environment": {"import_path": "farm_environment:FarmEnvironment"},
        }
    )
    result = await (await Trial.create(config)).run()
    if result.exception_info is not None:
        sys.stderr.write(f"{folder}, {agent}: {result.exception_info.exception_message}\n")
    return result.verifier_result and result.verifier_result.rewards


async def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    tasks = json.load(sys.stdin)
    room = asyncio.Semaphore(2)

    async def one(folder: str, agent: str, place: Path) -> Any:
        async with room:
            try:
                return await asyncio.wait_for(rewards_of(folder, agent, place), MAX_S)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    with TemporaryDirectory(prefix="harbor-trials-") as place:
        pairs = [(name, agent) for name in tasks for agent in AGENTS]
        found = await asyncio.gather(*(one(tasks[name], agent, Path(place)) for name, agent in pairs))
    answers: dict[str, dict[str, Any]] = {name: {} for name in tasks}
    for (name, agent), rewards in zip(pairs, found, strict=True):
        answers[name][agent] = rewards
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    asyncio.run(main())

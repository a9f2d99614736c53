"""The environments of these tests: installed once for a module, with one event loop and one kind of sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest

from farm.errors import RolloutError
from farm.records.request import BatchSettings, Limits
from farm.records.trajectory import ModelCall
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import PROVIDERS, farm_in
from tests.services.entry_points import installed
from tests.services.farms import farm_folder
from workers.environments.environment_servers import environment_servers
from workers.plugins.interfaces import Artefact, Completion
from workers.stages.stage_functions import evaluate, run
from workers.stages.stage_job import StageJob, resolve_problem
from workers.testing.fakes import ScriptedPolicy

ROOT = Path(__file__).parents[3]
PROJECTS = (ROOT / "examples" / "environment", ROOT / "tests" / "services" / "environment_project")

T = TypeVar("T")
InLoop: TypeAlias = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Yield an event loop in which environment servers stay warm from test to test."""
    with (
        farm_folder() as folder,
        farm_in(folder),
        installed(PROJECTS[0], folder / "example"),
        installed(PROJECTS[1], folder / "unruly"),
    ):
        if missing := PROVIDERS["namespace"]().missing():
            absent(missing)
        with asyncio.Runner() as runner:
            try:
                yield runner
            finally:
                runner.run(_close())


_MAX_RUNS = 8


class EnvironmentRun:
    """One run of an environment: its end, and the recorded data."""

    def __init__(self, environment: str, *script: Completion | Exception, agent: str = "", **fields: Any) -> None:
        limits, kind = Limits(**fields.pop("limits", {})), fields.pop("kind", "namespace")
        self.job = StageJob(
            rollout_id="b.0.0",
            attempt=1,
            sample_index=0,
            data_source="environment",
            fields={"environment": environment, **fields},
            batch=BatchSettings(limits=limits, agent=agent),
            sandbox_kind=kind,
        )
        self._script = script
        self._begin()

    def _begin(self) -> None:
        self.policy = ScriptedPolicy(*self._script)
        self.calls: dict[int, ModelCall] = {}

    async def score(self) -> float:
        """Run and score it. Raises the errors of the stages, unless another test caused a shortage of memory."""
        for _ in range(_MAX_RUNS - 1):
            try:
                return await self._scored()
            except RolloutError as error:
                if "the node ran short" not in str(error):
                    raise
                # a test that uses up memory does so several times
                await asyncio.sleep(1)
                self._begin()
        return await self._scored()

    async def _scored(self) -> float:
        problem = resolve_problem(self.job)
        done = await run(problem, self.policy, self._record, _keep)
        self.outcome = done.outcome
        self.submission = done.submission
        score, self.evaluator = await evaluate(problem, done.submission)
        self.details = score.details
        return score.value

    @property
    def observed(self) -> list[str]:
        """Return the texts that followed each turn."""
        return [message["content"] for call in self.calls.values() for message in call.observations]

    async def _record(self, call: ModelCall) -> None:
        self.calls[call.index] = call


async def _close() -> None:
    await environment_servers().aclose()


async def _keep(index: int, artefact: Artefact) -> str:
    return ""

"""A real bug, fixed by an agent program in a sandbox without a network, on a scripted engine, and scored."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from examples.problems import swe_problems
from farm.records.request import BatchSettings
from tests.doubles import EngineDouble
from workers.cli.agent_check import AgentTrial, run_on
from workers.handlers.swe import SweInstance
from workers.stages.stage_job import StageJob
from workers.testing.scripted_model import OrderedScript, Script, ScriptedTurn

SWE = SweInstance.model_validate(swe_problems()[0].fields)
FIX = f"git apply <<'END_OF_PATCH'\n{SWE.patch}\nEND_OF_PATCH\ngit diff --stat"


def job_of(agent: str, kind: str) -> StageJob:
    return StageJob(
        rollout_id=f"test-{uuid.uuid4().hex[:12]}",
        attempt=1,
        sample_index=0,
        data_source="swe",
        fields=swe_problems()[0].fields,
        batch=BatchSettings(agent=agent),
        sandbox_kind=kind,
    )


def run_rollout(agent: str, kind: str, turns: Sequence[ScriptedTurn]) -> AgentTrial:
    """Run a rollout of the issue: all three stages as a worker runs them."""
    return run_with_script(job_of(agent, kind), OrderedScript(turns, SWE.problem_statement[:60]))


def run_with_script(job: StageJob, script: Script) -> AgentTrial:
    """Run it on an engine that follows a script."""
    trial = AgentTrial()
    run_on(job, EngineDouble(script, weight_version="3"), trial)
    return trial

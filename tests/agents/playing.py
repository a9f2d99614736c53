"""A real bug, played by an agent program in a sandbox without a network, on a scripted engine, and scored."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.problems import swe_problems
from farm.records.request import Limits, SamplingParams
from farm.records.rollout import Outcome
from farm.records.token_audit import check
from farm.records.trajectory import Message, ModelCall, Segment, segments
from tests.doubles import EngineDouble
from workers import stages
from workers.handlers.swe import SweInstance
from workers.interfaces import Artefact
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.engine_view import EngineRecord
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.stage_job import StageJob, resolve_problem
from workers.testing.scripted_model import DONE, GIVE_UP, Script, ScriptedTurn
from workers.testing.serving import serving

SWE = SweInstance.model_validate(swe_problems()[0].fields)
MEND = f"git apply <<'END_OF_PATCH'\n{SWE.patch}\nEND_OF_PATCH\ngit diff --stat"


@dataclass
class PresetPlay:
    """One rollout: its end, its calls as they were recorded, its rows, and what the program printed."""

    outcome: Outcome | None = None
    reward: float = 0.0
    calls: list[ModelCall] = field(default_factory=list)
    rows: Sequence[Segment] = ()
    kept: dict[str, str] = field(default_factory=dict)

    async def record(self, call: ModelCall) -> None:
        self.calls.append(copy.deepcopy(call))

    async def keep(self, index: int, artefact: Artefact) -> str:
        self.kept[artefact.name] = artefact.data.decode("utf-8", "replace")
        return artefact.name

    @property
    def breaks(self) -> list[str]:
        """The reasons for which calls after the first begin a row."""
        return [call.begins for call in self.calls[1:] if call.begins]


class ByCount(Script):
    """Turns in order, also for a program that writes its history anew, in which no turn would be known again."""

    def __init__(self, turns: Sequence[ScriptedTurn], match: str) -> None:
        super().__init__([])
        self._turns, self._match = turns, match
        # a program may begin with an example that nobody sampled
        self._n_before: int | None = None

    def next_turn(self, messages: Sequence[Message], seed: int | None, begun: str = "") -> ScriptedTurn:
        """GIVE_UP where no user message has the text, as where a title is asked for."""
        if not any(self._match in str(message.get("content")) for message in messages if message["role"] == "user"):
            return GIVE_UP
        n_said = sum(message["role"] == "assistant" for message in messages)
        self._n_before = n_said if self._n_before is None else self._n_before
        n_played = n_said - self._n_before
        return self._turns[n_played] if n_played < len(self._turns) else DONE


def job_of(agent: str, kind: str) -> StageJob:
    return StageJob(
        rollout_id=f"test-{uuid.uuid4().hex[:12]}",
        attempt=1,
        sample_index=0,
        data_source="swe",
        fields=swe_problems()[0].fields,
        sampling=SamplingParams(),
        limits=Limits(),
        sandbox_kind=kind,
        model="",
        agent=agent,
    )


def play(agent: str, kind: str, turns: Sequence[ScriptedTurn]) -> PresetPlay:
    """Play the issue: all three stages as a worker runs them."""
    return play_by(job_of(agent, kind), ByCount(turns, SWE.problem_statement[:60]))


def play_by(job: StageJob, book: Script) -> PresetPlay:
    """Play it on an engine that says what a book has."""
    played = PresetPlay()

    async def main(url: str) -> None:
        address = EngineAddress(f"{url}/v1")
        pool = EnginePool(lambda: (EngineRecord(address, detected),))
        detected = await detect(address)
        policy = RolloutPolicy(StickyRouter(pool, RoutingKey(job.rollout_id)), job.rollout_id)
        try:
            problem = resolve_problem(job)
            await stages.init(problem)
            ended = await stages.run(problem, policy, played.record, played.keep)
            score, _ = await stages.evaluate(problem, ended.submission)
        finally:
            await pool.aclose()
        played.outcome, played.reward = ended.outcome, score.value

    with serving(EngineDouble(book, weight_version="3").app()) as url:
        try:
            asyncio.run(main(url))
        finally:
            played.rows = segments(played.calls)
    check(played.rows, played.calls)
    return played

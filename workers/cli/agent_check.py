"""The commands for agents: list the installed ones, and run one on a scripted engine, without a farm."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from farm.cli.console import console, say
from farm.errors import FarmError, NotFound
from farm.plugins import installed, load
from farm.records.request import BatchSettings, Limits
from farm.records.rollout import Outcome
from farm.records.token_audit import check as check_rows
from farm.records.trajectory import ModelCall, Segment, segments
from workers.plugins import registry
from workers.plugins.interfaces import Artefact
from workers.policy.engines import detect
from workers.policy.generation import EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.backend import record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.stages import stage_functions
from workers.stages.stage_job import StageJob, resolve_problem
from workers.testing.engine.scripted_engine import ScriptedEngine
from workers.testing.scripted_model import OrderedScript, Script, ScriptedTurn, ShellScript
from workers.testing.serving import serving

TASK = "Run one command of your choice, and then say that you are done."
MARK = "farm-agent-check"
_TAIL_LINES = 15


@dataclass
class AgentTrial:
    """One rollout: its end, its recorded calls, its rows, and the program's output."""

    outcome: Outcome | None = None
    reward: float = 0.0
    calls: list[ModelCall] = field(default_factory=list)
    rows: Sequence[Segment] = ()
    kept: dict[str, str] = field(default_factory=dict)

    async def record(self, call: ModelCall) -> None:
        # A call is recorded again once its observations are known.
        self.calls = [*(each for each in self.calls if each.index != call.index), copy.deepcopy(call)]

    async def keep(self, index: int, artefact: Artefact) -> str:
        self.kept[artefact.name] = artefact.data.decode("utf-8", "replace")
        return artefact.name

    @property
    def breaks(self) -> list[str]:
        """The reasons for which calls after the first begin a row."""
        return [call.begins for call in self.calls[1:] if call.begins]


def run_on(job: StageJob, engine: ScriptedEngine, trial: AgentTrial) -> None:
    """Run a job through all its stages, like a worker, on an engine of this process. Raises FarmError.

    After an error, `trial` has everything recorded so far. Raises AssertionError if its rows do not follow from its
    calls.
    """

    async def main(url: str) -> None:
        address = EngineAddress(f"{url}/v1")
        pool = EnginePool(lambda: (record_of(address, detected),))
        detected = await detect(address)
        policy = RolloutPolicy(StickyRouter(pool, RoutingKey(job.rollout_id)), job.rollout_id)
        try:
            problem = resolve_problem(job)
            await stage_functions.init(problem)
            ended = await stage_functions.run(problem, policy, trial.record, trial.keep)
            score, _ = await stage_functions.evaluate(problem, ended.submission)
        finally:
            await pool.aclose()
        trial.outcome, trial.reward = ended.outcome, score.value

    with serving(engine.app()) as url:
        try:
            asyncio.run(main(url))
        finally:
            trial.rows = segments(trial.calls)
    check_rows(trial.rows, trial.calls)


@click.group()
def main() -> None:
    """List installed agents, and run one on a scripted engine."""


@main.command(name="list")
def list_agents() -> None:
    """List the agents that a batch may request, with their origin."""
    table = Table(box=None, pad_edge=False)
    for title in ("agent", "from"):
        table.add_column(title, no_wrap=title == "agent", overflow="fold")
    for name, entry in sorted(installed(registry.AGENTS).items()):
        table.add_row(name, escape(str(getattr(entry, "value", entry))))
    console.print(table)


@main.command()
@click.argument("name")
@click.option("--task", default=TASK, show_default=True, metavar="TEXT", help="The agent's task.")
@click.option(
    "--turns",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The policy's turns, one per line: {content, tool_calls: [{name, arguments}]}.",
)
@click.option("--sandbox", default="auto", show_default=True, metavar="KIND")
@click.option("--timeout", "run_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds.")
def check(name: str, task: str, turns: Path | None, sandbox: str, run_s: float) -> None:
    """Run one rollout of an agent on a scripted engine, in a sandbox of this machine: exit 1 if that fails.

    The policy runs one shell command by any tool that the agent offers, then reports that it is done; --turns gives it
    other answers. Prints the recorded calls and training rows, and the reason for each further row.
    """
    try:
        known = sorted(installed(registry.AGENTS))
        if name not in known:
            raise NotFound(f"no agent is named {name!r}; installed here are: {', '.join(known)}")
        load(registry.AGENTS, name)
        kind = registry.chosen_sandbox(sandbox).kind
        script = _script(task, turns)
    except ValidationError as error:
        raise click.ClickException(f"{turns}: {error.errors()[0]['msg']}") from error
    except (FarmError, OSError, ValueError) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    click.echo(f"{name}: its packages, if it has any, are installed the first time, which takes minutes", err=True)
    trial = AgentTrial()
    failure = ""
    try:
        run_on(_job(name, task, kind, run_s), ScriptedEngine(script), trial)
    except (FarmError, AssertionError) as error:
        failure = f"{type(error).__name__}: {error}"
    failure = failure or ("" if trial.calls else "it made no model call")
    _print_calls(trial)
    if isinstance(script, ShellScript) and trial.calls:
        say(_tool_line(script, trial))
    if failure:
        _print_output(trial)
        say(f"{name}: {failure}")
        raise SystemExit(1)
    n_calls, n_rows = _counted(len(trial.calls), "call"), _counted(len(trial.rows), "training row")
    say(f"{name}: {trial.outcome}; {n_calls}, {n_rows}")


def _job(agent: str, task: str, kind: str, run_s: float) -> StageJob:
    return StageJob(
        rollout_id=f"check-{uuid.uuid4().hex[:12]}",
        attempt=1,
        sample_index=0,
        data_source="answer",
        fields={"question": task, "answer": "2"},
        batch=BatchSettings(limits=Limits(run_s=run_s), agent=agent),
        sandbox_kind=kind,
    )


def _script(task: str, turns: Path | None) -> Script:
    if turns is None:
        return ShellScript(f"echo {MARK}", "I am done.", task)
    lines = turns.read_text(encoding="utf-8").splitlines()
    return OrderedScript([ScriptedTurn.model_validate_json(line) for line in lines if line.strip()], task)


def _print_calls(trial: AgentTrial) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("call", "prompt", "sampled", "tools", "begins a row, as"):
        table.add_column(title, overflow="fold")
    for call in sorted(trial.calls, key=lambda each: each.index):
        tools = "" if call.tools is None else str(len(call.tools))
        cells = [str(call.index), str(call.n_prompt_tokens), str(call.n_response_tokens), tools, escape(call.begins)]
        table.add_row(*cells)
    if trial.calls:
        console.print(table)


def _tool_line(script: ShellScript, trial: AgentTrial) -> str:
    if not script.tool:
        return "none of its tools accepts a shell command, so the policy called none: --turns gives it other answers"
    ran = any(MARK in str(message.get("content")) for call in trial.calls[1:] for message in call.messages)
    ran = ran or any(MARK in str(message.get("content")) for call in trial.calls for message in call.observations)
    return f"its tool {script.tool} {'ran a command' if ran else 'was called, and its result was not sent back'}"


def _print_output(trial: AgentTrial) -> None:
    for name, text in trial.kept.items():
        for line in text.splitlines()[-_TAIL_LINES:]:
            say(f"  {name}: {line}")


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


if __name__ == "__main__":
    main()

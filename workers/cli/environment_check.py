"""The commands for multi-step environments: list the installed ones, and check whether one is deterministic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from farm.errors import FarmError, NotFound
from workers.environments.environment import Action, CalledTool
from workers.environments.environment_program import EnvironmentInstance, environment_names, environment_program
from workers.environments.environment_servers import EnvironmentServers
from workers.evaluators.answer import verified
from workers.plugins import registry

console = Console()

_VERIFIER_S = 120.0

_DEFAULT_ACTIONS = ("hello", "1", "\\boxed{1}", "[1]", "<answer>1</answer>", "hello", "2", "\\boxed{2}", "[2]", "3")


@click.group()
def main() -> None:
    """List installed multi-step environments, and check one."""


@main.command(name="list")
def list_environments() -> None:
    """List the installed environments, their packages, and the roles of other LLMs that they call."""
    table = Table(box=None, pad_edge=False)
    for title in ("environment", "packages", "roles", "sandbox"):
        table.add_column(title, no_wrap=title == "environment", overflow="fold")
    for name in environment_names():
        try:
            program = environment_program(name)
        except (NotFound, ValueError) as error:
            table.add_row(name, escape(str(error)), "", "")
            continue
        n_more = len(program.packages) - 1
        packages = program.packages[0] + (f" and {n_more} more" if n_more else "") if program.packages else "none"
        own = "shared by rollouts" if program.shared else "one for each rollout"
        table.add_row(name, escape(packages), ", ".join(program.roles), own + ("; network" if program.network else ""))
    console.print(table)


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """An environment's reply to an action: `messages` with their texts, and its reward."""

    messages: list[dict[str, Any]]
    reward: float
    over: bool


@main.command()
@click.argument("name")
@click.option("--id", "episode_id", default="", help="The id of one of its environments.")
@click.option("--kwargs", default="{}", metavar="JSON", help="As in an instance's fields.")
@click.option("--seed", default=0, show_default=True)
@click.option("--message", "prompt", multiple=True, help="A user message of the prompt; may be repeated.")
@click.option(
    "--action", "actions", multiple=True, help="A text, or a tool call as JSON: {name, arguments}. Repeat it."
)
@click.option("--rewards", nargs=2, type=float, metavar="LEAST MOST", help="The range of a step's reward.")
@click.option("--sandbox", default="auto", show_default=True, metavar="KIND")
@click.option("--package", "packages", multiple=True, metavar="NAME==VERSION")
def check(
    name: str,
    episode_id: str,
    kwargs: str,
    seed: int,
    prompt: Sequence[str],
    actions: Sequence[str],
    rewards: tuple[float, float] | None,
    sandbox: str,
    packages: Sequence[str],
) -> None:
    """Run the same actions three times, the last in a fresh process: exit 1 unless all observations are equal.

    A non-deterministic environment gives the samples of a group different problems, or different replies to the same
    action.
    """
    try:
        fields = {"environment": name, "id": episode_id, "kwargs": json.loads(kwargs), "seed": seed}
        fields["messages"] = [{"role": "user", "content": text} for text in prompt]
        instance = EnvironmentInstance.model_validate({**fields, "packages": packages, "rewards": rewards})
        kind = registry.chosen_sandbox(sandbox).kind
        n_packages = len(instance.program.packages) + len(packages)
        if n_packages:
            click.echo(f"{name}: {n_packages} packages are installed the first time, which takes minutes", err=True)
        episodes = asyncio.run(run_episodes(instance, kind, actions or _DEFAULT_ACTIONS))
    except ValidationError as error:
        raise click.ClickException("; ".join(each["msg"] for each in error.errors())) from error
    except (FarmError, ValueError) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    difference = first_difference(episodes)
    n_steps = len(episodes[0]) - 1
    if difference:
        console.print(f"{name}: not deterministic: {difference}", highlight=False, markup=False)
        raise SystemExit(1)
    step_rewards = [each.reward for each in episodes[0][1:]]
    console.print(f"{name}: deterministic over {n_steps} steps; rewards {step_rewards}", highlight=False, markup=False)


async def run_episodes(instance: EnvironmentInstance, kind: str, actions: Sequence[str]) -> list[list[ObservedStep]]:
    """Return three runs of the same actions, the last by another server than the first two. Raises RolloutError."""
    provider = registry.sandbox(kind)
    episodes = []
    for n_episodes in (2, 1):
        servers = EnvironmentServers()
        try:
            for _ in range(n_episodes):
                connection = await servers.connect(instance.program, provider, instance.packages)
                connection.rewards = instance.reward_range
                connection.verify = partial(verified, timeout_s=_VERIFIER_S)
                try:
                    begin = await connection.reset(instance.episode, 300.0)
                    steps = [ObservedStep([*map(dict, begin.messages), *map(dict, begin.tools)], 0.0, False)]
                    for number, text in enumerate(actions):
                        step = await connection.step(_action(text, number), 60.0)
                        over = step.terminated or step.truncated
                        steps.append(ObservedStep([dict(each) for each in step.messages], step.reward, over))
                        if over:
                            break
                    last = await connection.finish(60.0)
                    episodes.append([*steps, ObservedStep([], last, True)] if last is not None else steps)
                finally:
                    connection.drop()
        finally:
            await servers.aclose()
    return episodes


def _action(text: str, number: int) -> Action:
    try:
        call = json.loads(text)
    except ValueError:
        return Action(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Action(text)
    return Action("", (CalledTool(f"call_{number}", call["name"], dict(call.get("arguments") or {})),))


def first_difference(episodes: Sequence[Sequence[ObservedStep]]) -> str:
    """Return where runs of the same actions first differ, in words; empty if they are equal."""
    first, *others = episodes
    for number, other in enumerate(others, start=2):
        where = " (in a fresh process)" if number == len(episodes) else ""
        for index, (one, two) in enumerate(zip(first, other, strict=False)):
            if one != two:
                what = "the beginning" if index == 0 else f"the answer to action {index}"
                shown = [json.dumps(asdict(each), ensure_ascii=False)[:300] for each in (one, two)]
                return f"{what} differs in episode {number}{where}: {shown[0]} and {shown[1]}"
        if len(first) != len(other):
            return f"episode {number}{where} has {len(other) - 1} steps, and the first {len(first) - 1}"
    return ""


if __name__ == "__main__":
    main()

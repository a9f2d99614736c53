"""The command line: `farm up | node | api | engines | images | submit | watch | show | collect | doctor | …`.

Here stand the names of all commands and a line on each; what a command needs is loaded when it is run, so that
`farm --help` and a mistyped option answer at once. A command's line here and the first of its own help are the same.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.shell_completion import CompletionItem

from farm.startup import frozen_imports

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_INTERRUPTED = 130

COMMANDS = {
    "up": (
        "machine",
        "Run a whole farm on this machine until Ctrl-C: SQLite, Redis, three worker pools, API, page, Flower.",
    ),
    "node": ("machine", "Run this machine's part of a farm until SIGTERM; one per node, for example under srun."),
    "head": ("cluster.head", "Run the head of a farm on a cluster until Ctrl-C: Postgres, Redis, API, page, Flower."),
    "slurm": ("cluster.slurm", "Nodes of a farm as jobs of Slurm: script, up, ls, logs, scale, down."),
    "ray": ("cluster.ray", "Nodes of a farm on a Ray cluster, beside the trainer that runs there: up."),
    "api": ("api", "Serve the farm over HTTP until Ctrl-C."),
    "web": ("api", "Show the page with a recorded batch, without a farm, until Ctrl-C: --demo."),
    "flower": ("machine", "Show the farm's jobs in a browser, read-only."),
    "handlers": ("handlers", "The kinds of problems that can be submitted; `show NAME` has fields and an example."),
    "submit": ("submit", "Start a batch from FILE, one problem per line, and print its id."),
    "ls": ("batches", "List the newest batches: state, size, age, mean reward, submitter."),
    "watch": ("batches", "Show a batch's progress until it has ended, then a line per group."),
    "show": ("batches", "Print what a rollout did: its transcript, rewards, times per stage and token counts."),
    "artefacts": ("batches", "List what a rollout's tools made and the model was not shown, or fetch one of them."),
    "collect": (
        "collect",
        "Write a batch to a file once it has ended: arrays (.npz) or a rollout per line (.jsonl).",
    ),
    "export": (
        "upkeep.export_rollouts",
        "Write rollouts that have ended to JSON lines, Parquet or a folder of a HF dataset.",
    ),
    "eval": ("evaluate", "Play the problems of FILE k times each and report avg@k and pass@k, with intervals."),
    "cancel": ("batches", "End a batch, a group (BATCH.GROUP) or a rollout (BATCH.GROUP.SAMPLE) now."),
    "rescore": ("batches", "Score a batch, a group or a rollout again, without playing it again."),
    "engines": ("engines", "The LLM servers that all nodes share."),
    "engine": ("machine", "Run a double of an LLM server, to try the farm without a GPU: --scripted."),
    "sandbox": (
        "lending.sandbox",
        "Borrow a sandbox of the farm: start, list, exec, shell, python, put, get, renew, stop.",
    ),
    "images": ("machine", "Build sandbox images, name, list and prune them: alias, build, list, prune, pull."),
    "tasks": (
        "machine",
        "Try tasks before they are submitted: `check DIR` by their solutions, `attack DIR|FILE` by cheats.",
    ),
    "agents": (
        "machine",
        "Show the agents that are installed, or run one on a scripted engine, without a farm: list, check.",
    ),
    "environments": (
        "machine",
        "Show the environments with steps that are installed, or check that one does the same twice: list, check.",
    ),
    "keys": ("keys", "Keys of the API: named, with scopes and quotas; the farm's own is always there."),
    "log": (
        "keys",
        "List who ordered what: submits, cancels, changes of engines, weights and keys; the newest first.",
    ),
    "logs": ("upkeep.logs", "Print what the farm's processes logged about a batch, a group or a rollout, by time."),
    "drain": ("operations", "Have a node place no more rollouts, finish or hand back those that it has, and exit."),
    "completion": ("upkeep.completion", "Print what bash, zsh or fish read to complete commands, options and batches."),
    "config": ("upkeep.config", "Print each setting and where it comes from; --check looks for mistakes."),
    "doctor": ("operations", "Check what a farm needs here and say how to mend what is missing."),
    "metrics": ("operations", "Print the farm's numbers as Prometheus reads them; farm_violations is the alarm."),
    "prune": (
        "upkeep.prune",
        "Remove what is left of batches that ended long ago, but for their rewards.",
    ),
    "backup": ("upkeep.backup", "Write all that the farm's database holds to one file, while the farm runs on."),
    "restore": (
        "upkeep.backup",
        "Make an empty database what it was when a backup was made; its farm goes on from there.",
    ),
    "migrate": ("operations", "Bring the database to this farm's schema."),
}


class Commands(click.Group):
    """A group whose commands are loaded one by one, and which an interrupt ends with status 130 at any moment."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with frozen_imports():
            module = import_module(f"farm.cli.{COMMANDS[name][0]}")
        command: click.Command = getattr(module, name)
        return command

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        # of a command nothing is needed but its line, so none is loaded
        names = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, context, incomplete)]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=2)
            hint = f" Did you mean {' or '.join(close)}?" if close else " `farm --help` lists them."
            context.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _interruptible():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, context: click.Context) -> Any:
        with _interruptible():
            return super().invoke(context)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End the program with status 130 on an interrupt, also if a library swallows it and fails in another way.

    Code that is called from Rust or C, a regular expression of pydantic for example, loses the KeyboardInterrupt: its
    caller prints it as ignored, and goes on with what it could not make.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    def report(unraisable: UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report_before(unraisable)

    report_before = sys.unraisablehook
    # a program that ignores interrupts, in the background of a shell, keeps doing so
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _end()
    except Exception:
        if received:
            _end()
        raise
    finally:
        if is_default:
            sys.unraisablehook = report_before
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)


def _end() -> NoReturn:
    click.echo("interrupted", err=True)
    sys.exit(_INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollout-farm", prog_name="farm")
def main() -> None:
    """Play rollouts of LLM agents for reinforcement learning. Settings are read from FARM_* variables and farm.toml."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a transcript may hold what a model wrote and no terminal can show
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main(prog_name="farm")

"""The command line: `farm up | node | api | engines | images | submit | watch | show | collect | doctor | …`.

This module only holds the names and one-line help texts of the commands; each command's module is imported when it
runs, so `farm --help` and mistyped names answer at once. The line here equals the first line of the command's own help.
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
    "slurm": ("cluster.slurm", "Run nodes of a farm as Slurm jobs: script, up, ls, logs, scale, down."),
    "ray": ("cluster.ray", "Run nodes of a farm on a Ray cluster, next to its trainer: up."),
    "api": ("api", "Serve the farm over HTTP until Ctrl-C."),
    "web": ("api", "Serve the page with a recorded batch, without a farm, until Ctrl-C: --demo."),
    "flower": ("machine", "Show the farm's jobs in a browser, read-only."),
    "handlers": ("handlers", "List the kinds of problems; `show NAME` prints their fields and an example."),
    "submit": ("submit", "Submit a batch from FILE, one problem per line, and print its id."),
    "ls": ("batches", "List the newest batches: state, size, age, mean reward, submitter."),
    "watch": ("batches", "Show a batch's progress until it has ended, then a line per group."),
    "show": ("batches", "Print a rollout: transcript, rewards, times per stage and token counts."),
    "artefacts": ("batches", "List a rollout's artefacts (outputs that the model was not shown), or fetch one."),
    "collect": (
        "batches",
        "Write a batch to a file once it has ended: arrays (.npz) or a rollout per line (.jsonl).",
    ),
    "export": (
        "upkeep.export_rollouts",
        "Export ended rollouts to JSON lines, Parquet or a Hugging Face dataset folder.",
    ),
    "eval": ("evaluate", "Run the problems of FILE k times each and report avg@k and pass@k, with intervals."),
    "cancel": ("batches", "Cancel a batch, a group (BATCH.GROUP) or a rollout (BATCH.GROUP.SAMPLE)."),
    "rescore": ("batches", "Score a batch, a group or a rollout again, without running it again."),
    "engines": ("engines", "Manage the LLM servers that all nodes share."),
    "engine": ("machine", "Run a scripted LLM server, to try the farm without a GPU: --scripted."),
    "sandbox": (
        "lending.sandbox",
        "Borrow a sandbox of the farm: start, list, exec, shell, python, put, get, renew, stop.",
    ),
    "images": ("machine", "Manage sandbox images: alias, build, list, prune, pull."),
    "tasks": (
        "machine",
        "Test tasks before they are submitted: `check DIR` with their solutions, `attack DIR|FILE` with cheats.",
    ),
    "agents": (
        "machine",
        "List the installed agents, or run one on a scripted engine, without a farm: list, check.",
    ),
    "environments": (
        "machine",
        "List the installed step environments, or check that one is deterministic: list, check.",
    ),
    "keys": ("keys", "Manage named API keys with scopes and quotas; the farm's own key always exists."),
    "log": (
        "keys",
        "List the audit log, newest first: submits, cancels, changes of engines, weights and keys, by whom.",
    ),
    "logs": ("batches", "Print the farm's log lines about a batch, a group or a rollout, by time."),
    "drain": ("operations", "Drain a node: it gets no more rollouts, finishes or releases those it has, and exits."),
    "completion": (
        "upkeep.completion",
        "Print the shell completion of commands, options and batches for bash, zsh or fish.",
    ),
    "config": ("upkeep.config", "Print each setting and its source; --check looks for mistakes."),
    "doctor": ("operations", "Check what a farm needs here, and print the remedy for each problem."),
    "metrics": ("operations", "Print the farm's metrics for Prometheus; farm_violations is the alarm."),
    "prune": (
        "upkeep.stored_data",
        "Remove the data of old batches, except their rewards.",
    ),
    "backup": ("upkeep.stored_data", "Write the farm's whole database to one file, while the farm runs."),
    "restore": (
        "upkeep.stored_data",
        "Restore a backup into an empty database; its farm continues from there.",
    ),
    "migrate": ("operations", "Migrate the database to this farm's schema."),
}


class Commands(click.Group):
    """A group that imports each command when it runs, and ends with status 130 on an interrupt at any moment."""

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
        # the one-line help is enough: no command is imported
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
    """End the program with status 130 on an interrupt, even if a library swallows it and fails in another way.

    Code called from Rust or C, e.g. a regular expression of pydantic, loses the KeyboardInterrupt: its caller prints it
    as ignored and continues with an incomplete result.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    def report(unraisable: UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report_before(unraisable)

    report_before = sys.unraisablehook
    # a program that ignores interrupts, e.g. in the background of a shell, continues to do so
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
    """Run rollouts of LLM agents for reinforcement learning. Settings are read from FARM_* variables and farm.toml."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a transcript may hold characters that no terminal can show
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main(prog_name="farm")

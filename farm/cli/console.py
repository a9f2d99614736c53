"""Terminal output of commands: the console, one-line error messages, and the options that select the farm.

Rule: an error that a person can fix ends the command with one clear line and exit status 1, an interrupt with status
130. A traceback is a bug of the farm.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from farm.configuration import config_file
from farm.errors import FarmError, FarmUnreachable, InvalidRequest, StoreUnavailable
from farm.extras import check_extra
from farm.startup import frozen_imports

if TYPE_CHECKING:
    from farm.client.farm import Farm

console = Console()
F = TypeVar("F", bound=Callable[..., Any])

_FIRST_S = 2.0
"""Default wait for a farm that does not answer: a wrong address should not look like a slow farm."""
_WAIT = "farm.wait_s"
_AGAIN_S = 0.2
_COMPLETED_S = 0.5
_MOST_COMPLETED = 50


def say(text: str) -> None:
    """Print a line without wrapping or markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _note_wait(context: click.Context, parameter: click.Parameter, value: float | None) -> None:
    if value is not None:
        context.meta[_WAIT] = value


_url = click.option(
    "--url", help="The farm: a database URL, the folder of an embedded farm, or http://HOST:PORT. Default: FARM_*."
)
_wait = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    callback=_note_wait,
    expose_value=False,
    metavar="SECONDS",
    help=f"How long to wait for a farm that does not answer yet.  [default: {_FIRST_S:g}]",
)


def url_option(command: F) -> F:
    """Add `--url`, passed to the command, and `--wait`, used by `connected`."""
    return _url(_wait(command))


def first_s() -> float:
    """Return the seconds that the running command waits for the farm's first answer."""
    context = click.get_current_context(silent=True)
    return _FIRST_S if context is None else float(context.meta.get(_WAIT, _FIRST_S))


def waits() -> bool:
    """Return whether the running command was called with `--wait`."""
    context = click.get_current_context(silent=True)
    return context is not None and _WAIT in context.meta


def connected(url: str | Path | None) -> Farm:
    """Connect a command to its farm, waiting as `--wait` says. Raises like `farm.connect`."""
    # imported here: takes a second, which `--help` and a mistyped option must not cost
    from farm.client.connect import connect

    deadline = time.monotonic() + first_s()
    while True:
        try:
            with frozen_imports():
                return connect(url, first_s=max(0.0, deadline - time.monotonic()))
        except (FarmUnreachable, StoreUnavailable) as error:
            # a folder has no farm before `farm up` has made its database
            if waits() and time.monotonic() < deadline:
                time.sleep(_AGAIN_S)
                continue
            if isinstance(error, StoreUnavailable) or not str(url).startswith("http"):
                raise
            raise FarmUnreachable(f"{error}; is `farm api` running there? --wait SECONDS waits for it") from error


def plain_errors(command: F) -> F:
    """Print errors that a person can fix as one line, without a traceback; checks farm.toml for every command."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        if config_file.path_in_use() is not None:
            from farm.settings import settings

            settings()
        return command(*args, **kwargs)

    return one_line_errors(run)  # type: ignore[return-value]


def on_farm(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the farm that `--url` selects as first argument; with `--wait` and `plain_errors`."""

    @wraps(command)
    def run(*args: Any, url: str | None, **kwargs: Any) -> Any:
        with connected(url) as farm:
            return command(farm, *args, **kwargs)

    return url_option(plain_errors(run))


def one_line_errors(command: F) -> F:
    """Print errors that a person can fix as one line, without a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except InvalidRequest as error:
            lines = [f"{field}: {text}" if field else text for field, text in error.complaints]
            raise click.ClickException("InvalidRequest: " + "\n       ".join(lines)) from error
        except BrokenPipeError:
            # the reader of the output closed it: click ends the command
            raise
        except Exception as error:
            if not isinstance(error, (FarmError, OSError, *_database_errors())):
                raise
            # only the farm's own errors are worded for a person, in one line
            message = str(error) if isinstance(error, FarmError) else str(error).partition("\n")[0]
            raise click.ClickException(f"{type(error).__name__}: {message}") from error

    return run  # type: ignore[return-value]


def runs_farm(command: F) -> F:
    """Refuse a command that needs the whole farm if only the client is installed. Goes below `plain_errors`."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        check_extra(f"`{click.get_current_context().command_path}`")
        return command(*args, **kwargs)

    return run  # type: ignore[return-value]


def _database_errors() -> tuple[type[Exception], ...]:
    """Return the database library's base error; nothing if it was never loaded."""
    loaded = sys.modules.get("sqlalchemy.exc")
    return () if loaded is None else (loaded.SQLAlchemyError,)


def become(module: str, words: Sequence[str]) -> None:
    """Replace this process by `python -m MODULE WORDS`: the farm runs the workers as programs and imports none."""
    check_extra(f"`{click.get_current_context().command_path}`")
    # the program's own parser only knows the long name
    options = ["--help" if word == "-h" else word for word in words]
    os.execv(sys.executable, [sys.executable, "-m", module, *options])  # noqa: S606 - no shell is wanted


def signals() -> list[int]:
    """Catch Ctrl-C and SIGTERM from now on; return a list that grows with each."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # a list needs no lock, which the interrupted code might hold
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def batch_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the newest batches whose ids have this prefix; none if the farm does not answer at once."""
    from farm.client.connect import connect

    with contextlib.suppress(Exception), connect(first_s=_COMPLETED_S) as farm:
        batches = farm.batches(_MOST_COMPLETED)
        return [
            CompletionItem(each.batch_id, help=f"{each.state.value}, {each.n_rollouts} rollouts")
            for each in batches
            if each.batch_id.startswith(incomplete)
        ]
    return []


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds(context: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return a duration such as 30m, 12h or 7d in seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration such as 30m, 12h or 7d")
    return float(match[1]) * UNITS_S[match[2]]

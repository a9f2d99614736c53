"""Commands of the farm, run in the process of the tests: a new process takes longer than most commands."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import click
from click.testing import CliRunner

from farm.cli.console import console
from farm.settings import settings


def output_of(command: click.Command, *words: str, code: int = 0, env: Mapping[str, str | None] | None = None) -> str:
    """Return the output of a command, which must end with this exit code. `env` changes its environment; None unsets.

    The settings and signal handlers that it changes are restored.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # the console was made when its module was loaded, with the width at that time
    console.width = 200
    settings.cache_clear()
    try:
        done = CliRunner().invoke(command, words, env=env)
    finally:
        settings.cache_clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done.exit_code == code, done.output
    # a process would have shown a traceback
    assert isinstance(done.exception, SystemExit | None), done.exception
    return done.output

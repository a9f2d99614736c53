"""Checks the options of a node for `farm up` without starting one: `python -m workers.node.option_check OPTIONS`."""

from __future__ import annotations

import sys

import click

from workers.node.command import main

if __name__ == "__main__":
    try:
        context = main.make_context("farm up", sys.argv[1:])
        if context.params["shared"] is not None:
            raise click.UsageError("--at is only for `farm node`: `farm up` is a separate farm", context)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)

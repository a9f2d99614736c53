"""Reads the options of a node as `farm up` gives them: `python -m workers.node.option_check OPTIONS` starts none."""

from __future__ import annotations

import sys

import click

from workers.node.command import main

if __name__ == "__main__":
    try:
        main.make_context("farm up", sys.argv[1:])
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)

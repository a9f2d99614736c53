"""The command that prints the completion of `farm` for a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the shell completion of commands, options and batches for bash, zsh or fish.

    bash: `eval "$(farm completion bash)"` in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: `farm completion fish
    > ~/.config/fish/completions/farm.fish`.
    """
    group = click.get_current_context().find_root()
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(group.command, {}, "farm", "_FARM_COMPLETE")
    # its `source` would start a bash to ask for its version
    click.echo(script.source_template % script.source_vars())

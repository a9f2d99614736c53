"""The command that writes a batch to a file: `farm collect`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from farm.cli.console import batch_ids, connected, plain_errors, url_option
from farm.errors import InvalidRequest

_KINDS = (".npz", ".jsonl")


@click.command()
@click.argument("batch_id", shell_complete=batch_ids)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help=".npz or .jsonl")
@click.option("--whole-groups", is_flag=True, help="In .npz: only groups whose rollouts can all train.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds to wait for the batch to end.")
@url_option
@plain_errors
def collect(batch_id: str, output: Path, whole_groups: bool, timeout_s: float | None, url: str | None) -> None:
    """Write a batch to a file once it has ended: arrays (.npz) or a rollout per line (.jsonl).

    A line holds the messages, training rows, scores with their details, and times of one rollout. The output path is
    checked first; an existing file is replaced at the end.
    """
    from farm.cli import display
    from farm.cli.export import check_writable, replaced
    from farm.client.exports.rollout_line import rollout_line

    if output.suffix not in _KINDS:
        raise InvalidRequest(f"{output} must end in {' or '.join(_KINDS)}", field="output")
    if whole_groups and output.suffix != ".npz":
        raise InvalidRequest("only .npz leaves groups out; a .jsonl has every rollout", field="whole-groups")
    check_writable(output)
    # stdout is for programs
    progress = Console(stderr=True)
    with connected(url) as farm:
        display.watch(farm, batch_id, progress, timeout_s=timeout_s)
        rollouts = farm.collect(batch_id)
        with replaced(output) as file:
            if output.suffix == ".npz":
                import numpy as np

                from farm.adapters.arrays import arrays

                np.savez_compressed(file, **arrays(rollouts, whole_groups=whole_groups).as_dict())  # type: ignore[arg-type]
            else:
                for rollout in rollouts:
                    key = rollout.rollout_id
                    file.write(
                        rollout_line(
                            rollout, farm.calls(key), farm.timings(key), farm.rewards(key), farm.annotations.of(key)
                        )
                    )
    click.echo(f"{len(rollouts)} rollouts written to {output}")

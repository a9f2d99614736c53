"""The command that exports rollouts of batches for other programs: `farm export`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from farm.cli.console import batch_ids as completed_ids
from farm.cli.console import first_s, plain_errors, runs_farm, url_option
from farm.errors import InvalidRequest

if TYPE_CHECKING:
    from farm.store.reports.rollout_table import RolloutFilter

_FORMATS = ("jsonl", "parquet", "hf")


@click.command()
@click.argument("batch_ids", metavar="[BATCH]...", nargs=-1, shell_complete=completed_ids)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(_FORMATS), help="Default: by OUTPUT's suffix, hf for a folder.")
@click.option(
    "--filter",
    "conditions",
    metavar="NAME=VALUE",
    multiple=True,
    help="As on the page: outcome, state, data_source, min_reward, max_tokens, version, ...; may be repeated.",
)
@url_option
@plain_errors
@runs_farm
def export(
    batch_ids: tuple[str, ...], output: Path, form: str | None, conditions: tuple[str, ...], url: str | None
) -> None:
    """Export ended rollouts to JSON lines, Parquet or a Hugging Face dataset folder.

    Exports the given batches, or all that are kept. Each rollout has its messages, training rows (ids, mask,
    log-probabilities, versions) and scores. `datasets.load_dataset` reads a folder of the format hf. OUTPUT appears
    when it is complete. The API's page offers the same for one batch.
    """
    from farm.client.exports.rollout_export import all_batches, exported
    from farm.client.local import LocalFarm
    from farm.home import is_http

    if is_http(url):
        raise InvalidRequest("an API exports on its page, at .../web/batches/BATCH/rollouts.jsonl", field="url")
    form = form or {".jsonl": "jsonl", ".parquet": "parquet"}.get(output.suffix, "hf")
    wanted = _filter_of(conditions)
    _check(output, form)
    with contextlib.closing(LocalFarm.opened(url, None, first_s())) as farm:
        chosen = list(dict.fromkeys(batch_ids)) or farm.store.read(all_batches)
        n = _write(output, form, chain.from_iterable(exported(farm, each, wanted) for each in chosen))
    click.echo(f"{n} rollouts of {len(chosen)} batches written to {output}")


def _filter_of(conditions: tuple[str, ...]) -> RolloutFilter:
    from farm.store.reports.rollout_table import RolloutFilter

    pairs = [each.partition("=") for each in conditions]
    for name, equals, _ in pairs:
        if not equals:
            raise click.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--filter")
    try:
        return RolloutFilter.model_validate({name.strip(): value.strip() for name, _, value in pairs})
    except ValidationError as error:
        complaints = [(f"--filter {'.'.join(map(str, each['loc']))}", each["msg"]) for each in error.errors()]
        raise InvalidRequest.of(complaints) from None


def _check(output: Path, form: str) -> None:
    """Raise InvalidRequest, before anything is read, if the output cannot be written."""
    from farm.cli.export import check_writable

    if form != "hf":
        check_writable(output)
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequest(f"{output} already exists: give a new folder", field="output")
    else:
        check_writable(output.absolute().parent / f".{output.name}")


def _write(output: Path, form: str, rollouts: Iterator[dict[str, Any]]) -> int:
    from farm.cli.export import replaced
    from farm.client.exports.parquet_writer import ParquetWriter, write_dataset
    from farm.client.exports.rollout_line import written

    if form == "hf":
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".part", dir=output.absolute().parent))
        try:
            n = write_dataset(folder, rollouts)
            folder.chmod(0o755)
            folder.replace(output)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return n
    n = 0
    with replaced(output) as file:
        if form == "parquet":
            with ParquetWriter(file) as writer:
                for each in rollouts:
                    writer.write(each)
            return writer.n_rows
        for n, each in enumerate(rollouts, 1):  # noqa: B007
            file.write(written(each))
    return n

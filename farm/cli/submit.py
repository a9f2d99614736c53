"""The command that starts a batch: `farm submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import click

from farm.cli.console import connected, plain_errors, url_option
from farm.engine_urls import normal_url
from farm.errors import InvalidRequest, UnknownHandler

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PROBLEMS = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("file", type=_PROBLEMS, required=False)
@click.option("--request", "request_file", type=_FILE, help="All of a batch request (farm.BatchRequest), YAML or JSON.")
@click.option("--set", "fields", multiple=True, metavar="NAME=VALUE", help="A field of it, such as sampling.top_p=0.9.")
@click.option(
    "--as", "form", metavar="FORM", help="FILE has rows of a data set: verl, dapo, skyrl, nemo-gym, swe-bench, …"
)
@click.option("--map", "mapping", multiple=True, metavar="NAME=COLUMN", help="Of such rows: a field by another column.")
@click.option("--data-source", help="Of such rows: the handler that takes them, instead of the form's choice.")
@click.option(
    "--deduplicate/--no-deduplicate", default=None, help="Of such rows: read repeats once.  [default: by form]"
)
@click.option("-n", "--n-samples", type=int, help="Rollouts of each instance.  [default: 1]")
@click.option("--model", help="Play only on engines with this model.")
@click.option("--agent", help="Who plays it, such as mini-swe-agent. Default: the handler's own choice.")
@click.option("--sandbox", help="auto, singularity or namespace.  [default: auto]")
@click.option("--temperature", type=float, help="[default: 1.0]")
@click.option("--seed", type=int, help="Each call gets a seed derived from this, its instance, sample and turn.")
@click.option("--max-turns", type=int)
@click.option("--priority", type=int, help="[default: 0]")
@click.option("--key", help="Idempotency key: the same key gives the same batch.")
@click.option("--engine", help="An LLM server to add first if the farm does not have it: http://HOST:PORT/v1.")
@click.option("--engine-url", help="The batch's own LLM server, such as a trainer's, used by it alone.")
@click.option("--engine-key-file", type=click.File(), help="A file with its API key.")
@url_option
@plain_errors
def submit(
    file: Path | None,
    request_file: Path | None,
    fields: tuple[str, ...],
    form: str | None,
    mapping: tuple[str, ...],
    data_source: str | None,
    deduplicate: bool | None,
    n_samples: int | None,
    model: str | None,
    agent: str | None,
    sandbox: str | None,
    temperature: float | None,
    seed: int | None,
    max_turns: int | None,
    priority: int | None,
    key: str | None,
    engine: str | None,
    engine_url: str | None,
    engine_key_file: TextIO | None,
    url: str | None,
) -> None:
    """Start a batch from FILE, one problem per line, and print its id.

    FILE may be a folder of tasks in the form of Harbor or terminal-bench: each is an instance, its files are uploaded.
    A line is {"data_source": ..., "fields": {...}}; `farm handlers show NAME` has the fields and an example. With --as,
    FILE has the rows of a data set as they are, .jsonl, .json or .parquet; all are checked before any is played. What
    is not said here is taken from --request, and else the default of farm.BatchRequest; --set comes last. With --as,
    --set may give all rows a column that they lack: env_class of skyrl, server of nemo-gym, data_source of verl.
    """
    options = {
        "n_samples": n_samples,
        "model": model,
        "agent": agent,
        "sandbox": sandbox,
        "sampling.temperature": temperature,
        "sampling.seed": seed,
        "limits.max_turns": max_turns,
        "priority": priority,
        "idempotency_key": key,
        "engine_url": engine_url,
        "engine_key": None if engine_key_file is None else engine_key_file.read().strip(),
    }
    from farm.cli import readiness, request_files

    request = {} if request_file is None else request_files.read_request(request_file)
    problems = request_files.InstanceFile("")
    if file is not None:
        if "instances" in request:
            raise InvalidRequest(f"{request_file} has instances too: give one of the two", field=str(file))
        if form is None:
            if mapping or data_source or deduplicate is not None:
                raise click.UsageError(
                    "--map, --data-source and --deduplicate are for rows of a data set: give --as FORM"
                )
            if file.is_dir():
                # its tasks are read once the farm that takes their archives is there
                from farm.tasks.harbor_folder import task_paths

                task_paths(file)
                problems = request_files.InstanceFile(str(file))
            else:
                problems = request_files.read_problems(file)
        elif file.is_dir():
            raise click.UsageError(f"{file} is a folder of tasks, which are read as they are: leave --as out")
        else:
            given, fields = request_files.for_rows(form, fields)
            problems, counted = request_files.read_rows_as(file, form, mapping, data_source or "", deduplicate, given)
            click.echo(counted, err=True)
        request["instances"] = problems.instances
    elif "instances" not in request:
        raise click.UsageError("give a FILE with problems, one per line, or --request with `instances`")
    _put(request, options)
    request_files.set_fields(request, fields)
    with connected(url) as farm:
        if engine and normal_url(engine) not in [state.engine.url for state in farm.engines()]:
            # one that is there has settings of its own, such as a key
            farm.add_engine(engine, model or "")
        if file is not None and file.is_dir():
            from farm.cli.task_folders import instances_of

            request["instances"] = instances_of(file, farm, request)
        try:
            batch_id = farm.submit(request)
        except InvalidRequest as error:
            placed = [(problems.placed(place), problems.placed(text)) for place, text in error.complaints]
            raise InvalidRequest.of(placed) from error
        except UnknownHandler as error:
            raise UnknownHandler(problems.placed(str(error))) from error
        click.echo(batch_id)
        needed = not request.get("engine_url") and not all(each.get("engine_url") for each in request["instances"])
        for line in readiness.missing_parts(farm.nodes(), farm.engines(), needs_engine=needed):
            click.secho(line, fg="yellow", err=True)


def _put(request: dict[str, Any], options: dict[str, Any]) -> None:
    """Let what was said on the command line take the place of what the request file says."""
    for path, value in options.items():
        if value is not None:
            outer, _, inner = path.partition(".")
            if not inner:
                request[outer] = value
            elif isinstance(fields := request.setdefault(outer, {}), dict):
                fields[inner] = value

"""The command that starts a batch: `farm submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import click

from farm.cli.console import connected, plain_errors, url_option
from farm.configuration.service_urls import normal_url
from farm.errors import InvalidRequest, UnknownHandler

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path), required=False)
@click.option("--request", "request_file", type=_FILE, help="A batch request (farm.BatchRequest), YAML or JSON.")
@click.option(
    "--set", "fields", multiple=True, metavar="NAME=VALUE", help="Field of the request, such as sampling.top_p=0.9."
)
@click.option(
    "--as", "form", metavar="FORM", help="Format of data set rows in FILE: verl, dapo, skyrl, nemo-gym, swe-bench, …"
)
@click.option(
    "--map", "mapping", multiple=True, metavar="NAME=COLUMN", help="For such rows: read a field from another column."
)
@click.option("--data-source", help="For such rows: the handler, instead of the form's choice.")
@click.option(
    "--deduplicate/--no-deduplicate", default=None, help="For such rows: skip repeated ones.  [default: by form]"
)
@click.option("-n", "--n-samples", type=int, help="Rollouts per instance.  [default: 1]")
@click.option("--model", help="Use only engines with this model.")
@click.option("--agent", help="Agent, such as mini-swe-agent. Default: the handler's choice.")
@click.option("--sandbox", help="auto, singularity or namespace.  [default: auto]")
@click.option("--temperature", type=float, help="[default: 1.0]")
@click.option("--seed", type=int, help="Each call gets a seed derived from this, its instance, sample and turn.")
@click.option("--max-turns", type=int)
@click.option("--priority", type=int, help="[default: 0]")
@click.option("--key", help="Idempotency key: submitting the same key again returns the same batch.")
@click.option("--engine", help="LLM server to add first if the farm does not have it: http://HOST:PORT/v1.")
@click.option("--engine-url", help="Dedicated LLM server of the batch, such as a trainer's.")
@click.option("--engine-key-file", type=click.File(), help="A file with the API key of --engine-url.")
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
    """Submit a batch from FILE, one problem per line, and print its id.

    FILE may also be a folder of tasks in the format of Harbor or terminal-bench: each task is an instance, and its
    files are uploaded.

    A line is {"data_source": ..., "fields": {...}}; `farm handlers show NAME` prints the fields and an example. With
    --as, FILE has the unchanged rows of a data set, .jsonl, .json or .parquet; all rows are checked before any runs.

    Options override --request, and --set overrides both; other fields have the defaults of farm.BatchRequest. With
    --as, --set may also give all rows a column that they lack: env_class of skyrl, server of nemo-gym, data_source of
    verl.
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
            raise InvalidRequest(f"{request_file} also has instances: give only one of the two", field=str(file))
        if form is None:
            if mapping or data_source or deduplicate is not None:
                raise click.UsageError(
                    "--map, --data-source and --deduplicate are for rows of a data set: give --as FORM"
                )
            if file.is_dir():
                # the tasks are read once the farm that gets their archives is connected
                from farm.tasks.harbor_folder import task_paths

                task_paths(file)
                problems = request_files.InstanceFile(str(file))
            else:
                problems = request_files.read_problems(file)
        elif file.is_dir():
            raise click.UsageError(f"{file} is a folder of tasks, which have one format: leave --as out")
        else:
            columns, fields = request_files.for_rows(form, fields)
            problems, counted = request_files.read_rows_as(file, form, mapping, data_source or "", deduplicate, columns)
            click.echo(counted, err=True)
        request["instances"] = problems.instances
    elif "instances" not in request:
        raise click.UsageError("give a FILE with problems, one per line, or --request with `instances`")
    _put(request, options)
    request_files.set_fields(request, fields)
    with connected(url) as farm:
        if engine and normal_url(engine) not in [state.engine.url for state in farm.engines()]:
            # an engine that is registered has its own settings, such as a key
            farm.add_engine(engine, model or "")
        if file is not None and file.is_dir():
            from farm.cli.task_folders import instances_of

            request["instances"] = instances_of(file, farm, request)
        try:
            batch_id = farm.submit(request)
        except InvalidRequest as error:
            complaints = [(problems.placed(field), problems.placed(text)) for field, text in error.complaints]
            raise InvalidRequest.of(complaints) from error
        except UnknownHandler as error:
            raise UnknownHandler(problems.placed(str(error))) from error
        click.echo(batch_id)
        needed = not request.get("engine_url") and not all(each.get("engine_url") for each in request["instances"])
        for line in readiness.missing_parts(farm.nodes(), farm.engines(), needs_engine=needed):
            click.secho(line, fg="yellow", err=True)


def _put(request: dict[str, Any], options: dict[str, Any]) -> None:
    for path, value in options.items():
        if value is not None:
            outer, _, inner = path.partition(".")
            if not inner:
                request[outer] = value
            elif isinstance(fields := request.setdefault(outer, {}), dict):
                fields[inner] = value

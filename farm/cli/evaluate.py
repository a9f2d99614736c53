"""The command that evaluates a policy: `farm eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from farm.cli.console import connected, plain_errors, url_option
from farm.errors import InvalidRequest, UnknownHandler

if TYPE_CHECKING:
    from farm.client.farm import Farm
    from farm.evaluation.evaluation_report import Comparison, Difference, Estimate, EvaluationReport

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SHOWN = 5
"""Names that a line lists of many."""


@click.command()
@click.argument("file", type=_FILE)
@click.option(
    "-k", "--n-samples", type=click.IntRange(min=1), default=8, show_default=True, help="Rollouts per problem."
)
@click.option("--model", help="Use only engines with this model.")
@click.option("--name", help="Name of the evaluation. Default: from its problems and the weight version.")
@click.option("--request", "request_file", type=_FILE, help="Other fields of farm.BatchRequest, YAML or JSON.")
@click.option(
    "--set", "fields", multiple=True, metavar="NAME=VALUE", help="Field of the request, such as sampling.top_p=0.9."
)
@click.option("--as", "form", metavar="FORM", help="Format of data set rows in FILE, as for `farm submit`.")
@click.option("--temperature", type=float, help="[default: 1.0]")
@click.option("--solved-at", type=float, default=1.0, show_default=True, help="Minimum reward of a pass.")
@click.option("--compare", "other", metavar="REPORT|BATCH", help="Another evaluation: its JSON report or its batch.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, not as a table.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds to wait for the rollouts to end.")
@url_option
@plain_errors
def eval(
    file: Path,
    n_samples: int,
    model: str | None,
    name: str | None,
    request_file: Path | None,
    fields: tuple[str, ...],
    form: str | None,
    temperature: float | None,
    solved_at: float,
    other: str | None,
    output: Path | None,
    as_json: bool,
    timeout_s: float | None,
    url: str | None,
) -> None:
    """Run the problems of FILE k times each and report avg@k and pass@k, with intervals.

    FILE has lines as for `farm submit`. Repeating the same command continues its batch and runs nothing twice. Weights
    without a version number need a new --name whenever they change. --compare tests the difference to another
    evaluation of the same problems.
    """
    from farm.cli import display, request_files
    from farm.cli.export import check_writable, replaced
    from farm.evaluation.evaluation_report import compare, evaluation_request, named_rewards, report_of

    if output is not None:
        check_writable(output)
    request = {} if request_file is None else request_files.read_request(request_file)
    if "instances" in request:
        raise InvalidRequest(f"{request_file} also has instances: give only one of the two", field=str(file))
    if form is None:
        problems = request_files.read_problems(file)
    else:
        columns, fields = request_files.for_rows(form, fields)
        problems, counted = request_files.read_rows_as(file, form, (), "", None, columns)
        click.echo(counted, err=True)
    request_files.set_fields(request, fields)
    request |= {"n_samples": n_samples} | ({} if model is None else {"model": model})
    if temperature is not None and isinstance(sampling := request.setdefault("sampling", {}), dict):
        sampling["temperature"] = temperature
    # stdout is for programs
    progress = Console(stderr=True)
    with connected(url) as farm:
        try:
            batch_request = evaluation_request(problems.instances, request, name=name, version=farm.newest_version())
            _say_if_known(farm, str(batch_request.idempotency_key), progress)
            batch_id = farm.submit(batch_request)
        except InvalidRequest as error:
            complaints = [(problems.placed(field), problems.placed(text)) for field, text in error.complaints]
            raise InvalidRequest.of(complaints) from error
        except UnknownHandler as error:
            raise UnknownHandler(problems.placed(str(error))) from error
        other_report = None if other is None else _other(farm, other, solved_at)
        display.watch(farm, batch_id, progress, timeout_s=timeout_s)
        shown = str(batch_request.idempotency_key).removeprefix("eval:")
        rollouts = farm.rollouts(batch_id)
        report = report_of(
            rollouts,
            n_samples=n_samples,
            named=named_rewards(farm, rollouts),
            name=shown,
            batch_id=batch_id,
            model=batch_request.model,
            solved_at=solved_at,
        )
    comparison = None if other_report is None else compare(report, other_report)
    values = report.as_json() | ({} if comparison is None else {"comparison": comparison.as_json()})
    if output is not None:
        with replaced(output) as written:
            written.write(json.dumps(values, indent=1).encode() + b"\n")
    if as_json:
        click.echo(json.dumps(values))
    else:
        _print(report, comparison)


def _say_if_known(farm: Farm, key: str, progress: Console) -> None:
    for batch in farm.runs.keyed_batches([key]):
        status = farm.status(batch.batch_id)
        ended = f"{status.n_finished} of {status.n_rollouts} rollouts have ended"
        progress.print(f"continuing {batch.batch_id}: {ended}", highlight=False)


def _other(farm: Farm, other: str, solved_at: float) -> EvaluationReport:
    """Return the evaluation in a file or of a batch. Raises InvalidRequest, NotFound."""
    from farm.evaluation.evaluation_report import EvaluationReport, report_of

    path = Path(other)
    if path.is_file():
        try:
            return EvaluationReport.from_json(json.loads(path.read_bytes()), other)
        except ValueError as error:
            raise InvalidRequest(f"not JSON: {error}", field=other) from error
    status = farm.status(other)
    if not status.done:
        raise InvalidRequest(f"{status.n_finished} of {status.n_rollouts} rollouts have ended", field="--compare")
    rollouts = farm.rollouts(other)
    n_samples = 1 + max(rollout.sample_index for rollout in rollouts)
    return report_of(rollouts, n_samples=n_samples, name=other, batch_id=other, solved_at=solved_at)


def _print(report: EvaluationReport, comparison: Comparison | None) -> None:
    from farm.cli.display import print_whole
    from farm.evaluation.evaluation_report import short_instances

    console = Console()
    print_whole(console, scores_table(report))
    for line in notes(report, short_instances(report)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if comparison is not None:
        console.print()
        print_whole(console, differences_table(comparison))
        for where, names in (("here", comparison.only_here), ("there", comparison.only_there)):
            if names:
                line = f"{len(names)} instances are scored only {where}: {_some(names)}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def scores_table(report: EvaluationReport) -> Table:
    """Return a line per data source: avg@k and pass@j, and avg@k of named rewards, each with its interval."""
    passes = list(next(iter(report.sources.values())).passed)
    named = sorted({name for source in report.sources.values() for name in source.named})
    rows = [
        [
            *(name, str(source.n_instances), _interval(source.average)),
            *(_interval(source.passed[j]) for j in passes),
            *(_interval(source.named.get(each)) for each in named),
        ]
        for name, source in report.sources.items()
    ]
    averages = [f"{name}: avg@{report.n_samples}" for name in named]
    columns = ["data_source", "instances", f"avg@{report.n_samples}", *(f"pass@{j}" for j in passes), *averages]
    return _table(f"{report.name}: batch {report.batch_id}, 95 % intervals by bootstrap over instances", columns, rows)


def differences_table(comparison: Comparison) -> Table:
    """Return a line per data source: the difference to another evaluation, and the probability that it is chance."""
    rows = [
        [
            name,
            "0" if average is None else str(average.estimate.n),
            *_difference(average),
            *_difference(comparison.passed[name])[:2],
        ]
        for name, average in comparison.average.items()
    ]
    k = comparison.n_samples
    columns = ["data_source", "instances", f"avg@{k}", "p", "better", "worse", f"pass@{k}", "p"]
    title = f"{comparison.name} - {comparison.other}: paired by instance, p of the two-sided sign-flip permutation test"
    return _table(title, columns, rows)


def notes(report: EvaluationReport, short: dict[str, int] | Any) -> list[str]:
    """Return notes on what the table leaves out, a line each: rollouts and instances without enough scores."""
    lines = [
        f"{len(ids)} rollouts without a score: {kind} ({_some(ids)})" for kind, ids in sorted(report.unscored.items())
    ]
    if short:
        counts = [f"{name} ({n})" for name, n in short.items()]
        lines.append(
            f"{len(short)} instances have fewer than {report.n_samples} scored samples, and are left out of pass@j "
            f"beyond those: {_some(counts)}"
        )
    oldest, newest = report.versions
    if oldest is not None and oldest != newest:
        lines.append(f"the weights changed during the run: versions {oldest} to {newest}")
    return lines


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """Return a table with complete cells, however narrow the terminal is."""
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        width = max(len(cells[index]) for cells in [columns, *rows])
        table.add_column(column, justify="right" if index else "left", no_wrap=True, min_width=width)
    for cells in rows:
        table.add_row(*map(escape, cells))
    return table


def _interval(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})"


def _difference(value: Difference | None) -> tuple[str, str, str, str]:
    if value is None:
        return "-", "-", "-", "-"
    mean = value.estimate
    shown = f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"
    return shown, f"{value.p_value:.4f}", str(value.n_better), str(value.n_worse)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")

"""The cache of images from the command line: `farm images alias | build | list | prune | pull`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import ValidationError
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farm.cli.console import UNITS_S, console, say, seconds
from farm.embedded.node_folder import own_folder
from farm.errors import FarmError, ImageError, InvalidRequest
from farm.records.request import Instance, SandboxSpec
from farm.settings import choose, settings
from workers.config import SandboxConfig
from workers.node.image_prefetch import PrefetchJob, PrefetchResult, prefetch_all
from workers.plugins import registry
from workers.sandboxes.images.dockerfile.dockerfile_source import PREFIX
from workers.sandboxes.images.image import CACHED, aliases, remove_alias, set_alias
from workers.sandboxes.images.image_cache import CachedImage, entries
from workers.sandboxes.images.image_pruning import beyond, everything, examined, is_in_use, prune, unused_since
from workers.sandboxes.images.image_sources import HOST
from workers.stages.stage_job import needed_by

F = TypeVar("F", bound=Callable[..., Any])

_MODES = ("scratch", "versioned", "lock")
BUILDERS = ("own", "buildah")

_jobs = click.option(
    "--jobs", default=4, show_default=True, type=click.IntRange(1, 64), help="Number of concurrent builds."
)


def _mode(command: F) -> F:
    return click.option("--mode", type=click.Choice(_MODES), help="Instead of FARM_IMAGE_CACHE; scratch rebuilds it.")(
        command
    )


class _Plain(click.Group):
    """Prints one line for an error that the user can fix, without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except FarmError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error


@click.group(cls=_Plain)
def main() -> None:
    """Manage the image cache of this machine, or of all nodes that share its home."""
    shared = settings()
    choose(scratch=own_folder(shared.scratch, "images", str(shared.home.absolute())))


@main.command()
@click.argument("references", nargs=-1, required=True)
@click.option(
    "--value", "values", multiple=True, metavar="NAME=VALUE", help="For a template or a Dockerfile; may be repeated."
)
@click.option("--network", is_flag=True, help="Let Dockerfiles use the network while they are built.")
@click.option("--builder", type=click.Choice(BUILDERS), help="Instead of FARM_IMAGE_BUILDER, for Dockerfiles.")
@_jobs
@_mode
def build(
    references: tuple[str, ...],
    values: tuple[str, ...],
    network: bool,
    builder: str | None,
    jobs: int,
    mode: str | None,
) -> None:
    """Build missing images: any image name of a SandboxSpec, or a folder with a Dockerfile."""
    if network:
        choose(build_network=True)
    if builder:
        choose(image_builder=builder)
    pairs = [value.partition("=")[::2] for value in values]
    if any("=" not in value for value in values):
        raise click.BadParameter("a value must be NAME=VALUE", param_hint="--value")
    specs = [SandboxSpec(image=_absolute(name), image_values=dict(pairs)) for name in dict.fromkeys(references)]
    _prepare(
        [PrefetchJob(name, spec, by_name=True) for name, spec in zip(dict.fromkeys(references), specs, strict=True)],
        jobs,
        mode,
    )


def _absolute(reference: str) -> str:
    """Return a path that means the same in any folder; for a build context, as such."""
    path = Path(reference)
    if reference.startswith(PREFIX):
        folder, mark, rest = reference.removeprefix(PREFIX).partition("#")
        return f"{PREFIX}{Path(folder).absolute()}{mark}{rest}"
    if (path / "Dockerfile").is_file():
        return f"{PREFIX}{path.absolute()}"
    return str(path.absolute()) if path.exists() else reference


@main.command()
@click.argument("name", required=False)
@click.argument("image", required=False)
@click.option("--remove", is_flag=True, help="Forget the name.")
def alias(name: str | None, image: str | None, remove: bool) -> None:
    """Name a base image, such as ubuntu:24.04, and its target: a folder, a .sif, an archive. No arguments: list."""
    config = SandboxConfig.of(settings())
    if name is None:
        for each, reference in aliases(config).items():
            say(f"{each}  {reference}")
    elif remove:
        if not remove_alias(config, name):
            raise ImageError(f"there is no image named {name}: `farm images alias` lists the existing ones")
    elif image is None:
        raise click.UsageError("name the target: farm images alias NAME IMAGE")
    else:
        reference = _absolute(image)
        if reference != HOST and not reference.startswith(("/", CACHED, PREFIX)) and ":" not in reference:
            raise ImageError(f"there is no image {image} here: name a folder, a .sif or an archive")
        set_alias(config, name, reference)


@main.command()
@click.option(
    "--from", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Instances, one per line."
)
@click.option("--agent", default="", metavar="NAME", help="The agent; by default each handler's.")
@_jobs
@_mode
def pull(file: Path | None, agent: str, jobs: int, mode: str | None) -> None:
    """Prepare all that instances and their agents need: images, archives, packages. Lines as for `farm submit`.

    With only an agent: what it needs in an otherwise empty sandbox.
    """
    if file is None and not agent:
        raise click.UsageError("give --from, --agent or both")
    _prepare(_jobs_of(_specs(file, agent)), jobs, mode)


def _specs(file: Path | None, agent: str) -> Iterator[SandboxSpec]:
    """Return the specs of a file's instances, or of the agent only. Raises InvalidRequest for an invalid line."""
    if file is None:
        specs = [needed_by(registry.agent(agent), None)]
    else:
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        specs = [_spec(line, agent, f"{file}:{number}") for number, line in lines if line.strip()]
    return (spec for spec in specs if spec is not None)


def _jobs_of(specs: Iterable[SandboxSpec]) -> list[PrefetchJob]:
    """Return one job for each distinct resource; each program of an agent is one."""
    jobs: dict[str, PrefetchJob] = {}
    for spec in specs:
        for parts in _parts_of(spec):
            jobs.setdefault(parts.model_dump_json(), PrefetchJob(_label(parts), parts))
    return list(jobs.values())


_PARTS = (
    *("image", "image_values", "fallback_image", "archives", "packages", "without_dependencies"),
    *("agent_packages", "agent_python"),
)
"""The fields of a sandbox that require preparation, in addition to its agent's programs."""


def _parts_of(spec: SandboxSpec) -> Iterator[SandboxSpec]:
    yield SandboxSpec(**{name: getattr(spec, name) for name in _PARTS})
    for program in spec.agent_programs:
        yield SandboxSpec(agent_programs=(program,))


def _spec(line: str, agent: str, where: str) -> SandboxSpec | None:
    try:
        instance = Instance.model_validate(json.loads(line))
        kind = registry.handler(instance.data_source)
        needed = kind(kind.instance_type.model_validate(instance.fields)).sandbox()
        return needed_by(registry.agent(agent or kind.agent), needed)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", field=where) from error
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}", field=where) from error


def _label(spec: SandboxSpec) -> str:
    if spec.agent_programs:
        return ", ".join(f"{each.name} ({each.kind}: {each.source})" for each in spec.agent_programs)
    values = [f"{name}={value}" for name, value in sorted(spec.image_values.items())]
    parts = [" ".join([spec.image, *values]), *(f"{archive.name} {archive.version}" for archive in spec.archives)]
    for packages, whose in ((spec.packages, "packages"), (spec.agent_packages, "packages of its agent")):
        if packages:
            parts.append(f"{len(packages)} {whose}")
    return " + ".join(parts)


def _prepare(jobs: Sequence[PrefetchJob], n_processes: int, mode: str | None) -> None:
    """Run the jobs with a progress bar; print each failure once. Exit code 1 on failure, 130 if interrupted."""
    if mode:
        choose(image_cache=mode)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("images", total=len(jobs))

            def tell(done: PrefetchResult) -> None:
                mark = "[red]failed[/red]" if done.error else "[green]ok[/green]    "
                progress.console.print(f"{mark} {done.seconds:7.1f} s  {escape(done.job.label)}", soft_wrap=True)
                for note in done.notes:
                    progress.console.print(f"    note: {escape(note)}", soft_wrap=True)
                progress.advance(bar)

            results = prefetch_all(jobs, n_processes, tell)
    except KeyboardInterrupt:
        console.print("interrupted: unfinished builds are removed; finished ones are kept")
        sys.exit(130)
    _report([done for done in results if done.error])


def _report(failed: Sequence[PrefetchResult]) -> None:
    reasons: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for done in failed:
        reasons.setdefault((done.error, done.lines), []).append(done.job.label)
    for (error, lines), labels in reasons.items():
        more = f" (and {len(labels) - 1} more)" if len(labels) > 1 else ""
        console.print(f"\n{labels[0]}{more}: {error}", style="red", markup=False, soft_wrap=True)
        for line in lines:
            say(f"    {line}")
    if failed:
        sys.exit(1)


@main.command(name="list")
def show() -> None:
    """List cached images, the most recently used first."""
    config = SandboxConfig.of(settings())
    cached = sorted(entries(config), key=lambda entry: entry.last_used_at, reverse=True)
    table = Table(box=None, pad_edge=False)
    for column in ("image", "key", "MB", "built", "in s", "last used", "mode", ""):
        right = column in {"MB", "in s"}
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column != "image")
    for entry in cached:
        table.add_row(*_row(entry), "in use" if is_in_use(config, entry.folder) else "")
    console.print(table)
    console.print(f"{len(cached)} images, {_mb(sum(entry.card.n_bytes for entry in cached))} MB", highlight=False)


def _named(entry: CachedImage) -> str:
    return ", ".join(entry.names) or entry.card.key


def _row(entry: CachedImage) -> tuple[str, ...]:
    card = entry.card
    used = ago(entry.last_used_at) if entry.used_at else "never"
    return (
        escape(_named(entry)),
        card.key[:12],
        _mb(card.n_bytes),
        ago(card.built_at),
        f"{card.build_s:.1f}",
        used,
        card.mode,
    )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f}"


def ago(instant: float) -> str:
    """Return how long ago an instant was, in seconds since 1970, such as `5 m ago`."""
    age_s = max(0.0, time.time() - instant)
    unit = next((unit for unit in "wdhm" if age_s >= UNITS_S[unit]), "s")
    return f"{age_s / UNITS_S[unit]:.0f} {unit} ago"


@main.command(name="prune")
@click.option(
    "--older-than", "older_s", metavar="AGE", callback=seconds, help="Those unused for this long, such as 7d."
)
@click.option("--keep-mb", type=click.IntRange(min=0), help="The least recently used, until the rest take this much.")
@click.option("--all", "all_of_it", is_flag=True, help="Everything that is not in use.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
def prune_command(older_s: float | None, keep_mb: int | None, all_of_it: bool, dry_run: bool) -> None:
    """Remove images, environments, archives and programs, except those in use by a sandbox, or used by another node in
    the last day.
    """
    if [older_s is not None, keep_mb is not None, all_of_it].count(True) != 1:
        raise click.UsageError("give one of --older-than, --keep-mb and --all")
    config = SandboxConfig.of(settings())
    if all_of_it:
        wanted = everything(config)
    elif keep_mb is not None:
        wanted = beyond(config, keep_mb * 1_000_000)
    else:
        wanted = unused_since(config, time.time() - (older_s or 0.0))
    pruned = examined(config, wanted) if dry_run else prune(config, wanted)
    _say_pruned([(each.entry, each.kept) for each in pruned])


def _say_pruned(pruned: Sequence[tuple[CachedImage, str]]) -> None:
    for entry, kept in pruned:
        console.print(f"{f'kept ({kept})' if kept else 'gone'}: {_named(entry)}", markup=False, soft_wrap=True)
    gone = [entry.card.n_bytes for entry, kept in pruned if not kept]
    console.print(f"{len(gone)} images, {_mb(sum(gone))} MB", highlight=False)


if __name__ == "__main__":
    main(prog_name="farm images")

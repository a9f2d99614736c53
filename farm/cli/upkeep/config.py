"""The command that shows the settings: `farm config`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

import click

from farm.cli.console import one_line_errors
from farm.configuration import config_file
from farm.configuration.secret_values import HIDDEN, has_credentials, without_credentials
from farm.errors import InvalidRequest


@click.command()
@click.option("--check", is_flag=True, help="Check the file and the variables; exit status 1 on mistakes.")
@one_line_errors
def config(check: bool) -> None:
    """Print each setting and its source; --check looks for mistakes.

    A variable FARM_NAME overrides the file, and the file the default. The file is FARM_CONFIG, else ./farm.toml, else
    farm.toml in FARM_HOME. Secrets are not shown.
    """
    if check:
        sys.exit(_report(_complaints()))
    from farm.settings import PREFIX, SET_BY_FARM, Settings, settings, source_of

    path, known = config_file.path_in_use(), settings()
    looked = ", ".join(map(str, config_file.candidate_paths()))
    click.echo(f"# file: {path}" if path is not None else f"# no file; looked for {looked}")
    shown = {name: _shown(name, getattr(known, name)) for name in Settings.model_fields if name not in SET_BY_FARM}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{name:{width}} = {value}  # {source_of(name)}")
    click.echo(f"# each can also be set as {PREFIX}NAME; docs/reference/settings.md explains them")


def _shown(name: str, value: Any) -> str:
    """Return a value in the notation of the file, without passwords."""
    from farm.settings import Settings

    if value is None:
        return "(none)"
    if isinstance(value, Mapping):
        hidden = not Settings.model_fields[name].repr
        inner = {key: HIDDEN if hidden else without_credentials(str(each)) for key, each in value.items()}
        return "{" + ", ".join(f"{_text(key)} = {_text(each)}" for key, each in inner.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:_}" if isinstance(value, int) else f"{value!r}"
    is_secret = not Settings.model_fields[name].repr and value != Settings.model_fields[name].default
    return _text(HIDDEN if is_secret else without_credentials(str(value)))


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(each):04x}" if each < " " or each == "\x7f" else each for each in escaped) + '"'


def _report(complaints: list[tuple[str, str]]) -> int:
    for source, text in complaints:
        click.echo(f"{source}: {text}" if source else text, err=True)
    if not complaints:
        path = config_file.path_in_use()
        click.echo(f"ok: {path}" if path is not None else "ok: there is no file; see `farm config`")
    return 1 if complaints else 0


def _complaints() -> list[tuple[str, str]]:
    """Return (source, text) for every fault of the file and the variables."""
    from farm.settings import PREFIX, Settings, settings

    known = {f"{PREFIX}{name}".upper(): name for name in Settings.model_fields}
    complaints = [
        (variable, f"is not a setting; {config_file.nearest(variable, Settings.model_fields)}")
        for variable in sorted(map(str.upper, os.environ))
        if variable.startswith(PREFIX)
        and variable not in {*known, config_file.VARIABLE}
        and not variable.startswith("FARM_TEST")
    ]
    try:
        if (path := config_file.path_in_use()) is not None:
            complaints += _open_secrets(config_file.ConfigFile(path))
        settings()
    except InvalidRequest as error:
        complaints += error.complaints
    return complaints


def _open_secrets(file: config_file.ConfigFile) -> list[tuple[str, str]]:
    """Return a complaint if other users can read a file with secrets."""
    from farm.settings import Settings

    secret = [
        name
        for name, value in file.values.items()
        if (name in Settings.model_fields and not Settings.model_fields[name].repr) or has_credentials(str(value))
    ]
    mode = stat.S_IMODE(file.path.stat().st_mode)
    if secret and mode & 0o004:
        return [
            (
                file.location_of(secret[0]),
                f"{secret[0]} can be read by all users of this machine: chmod o-r {file.path}",
            )
        ]
    return []

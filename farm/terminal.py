"""How commands speak to a person: one console, one line for what can be mended, one way to name the farm."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from farm.errors import FarmError

console = Console()
F = TypeVar("F", bound=Callable[..., Any])

url_option = click.option(
    "--url", help="The farm: a database URL, the folder of an embedded farm, or http://HOST:PORT. Default: FARM_*."
)


def plain_errors(command: F) -> F:
    """One line for what a person can mend; no traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (FarmError, OSError, SQLAlchemyError) as error:
            # only what the farm raises on purpose is worded for a person, in one line
            said = str(error) if isinstance(error, FarmError) else str(error).partition("\n")[0]
            raise click.ClickException(f"{type(error).__name__}: {said}") from error

    return run  # type: ignore[return-value]

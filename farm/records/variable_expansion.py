"""Variables in a task's environment tables, `${NAME}` and `${NAME:-default}`, from the secrets of its batch alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from farm.errors import InvalidRequest

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")
_WHOLE = re.compile(r"\$\{([^}:]+)(:-(.*))?\}")


def names_in(table: Mapping[str, str], *, whole: bool = False) -> set[str]:
    """Return the variables without a default that the values of a table name, `whole` as in `expanded`."""
    return {match[1] for value in table.values() for match in _matches(value, whole) if match[2] is None}


def expanded(table: Mapping[str, str], secrets: Mapping[str, str], *, whole: bool = False) -> dict[str, str]:
    """Return a table with the variables of its values replaced, once: what a secret contains is left as it is.

    An environment of this process is never read. `${NAME:-default}` takes its default for a name that is missing or
    empty. With `whole`, as in Harbor, only a value that is nothing but a variable is replaced, and an empty secret is
    taken. Raises InvalidRequest with all names that are missing and have no default.
    """
    if missing := sorted(names_in(table, whole=whole) - secrets.keys()):
        names = ", ".join(missing)
        raise InvalidRequest(f"a task names variables that its batch has no secret for: {names}", field="secrets")
    if whole:
        return {name: _whole(value, secrets) for name, value in table.items()}
    return {name: _VARIABLE.sub(lambda match: _value(match, secrets), value) for name, value in table.items()}


def _matches(value: str, whole: bool) -> Iterable[re.Match[str]]:
    return filter(None, [_WHOLE.fullmatch(value)]) if whole else _VARIABLE.finditer(value)


def _whole(value: str, secrets: Mapping[str, str]) -> str:
    match = _WHOLE.fullmatch(value)
    return secrets.get(match[1], match[3]) if match else value


def _value(match: re.Match[str], secrets: Mapping[str, str]) -> str:
    given = secrets.get(match[1], "")
    return match[3] if match[3] is not None and not given else given

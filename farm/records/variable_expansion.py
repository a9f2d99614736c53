"""Variables in a task's environment tables, `${NAME}` and `${NAME:-default}`, set only from its batch's secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from farm.errors import InvalidRequest

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")
_WHOLE = re.compile(r"\$\{([^}:]+)(:-(.*))?\}")


def names_in(table: Mapping[str, str], *, whole: bool = False) -> set[str]:
    """Return the variables without a default in the values of a table; `whole` as in `expanded`."""
    return {match[1] for value in table.values() for match in _matches(value, whole) if match[2] is None}


def expanded(table: Mapping[str, str], secrets: Mapping[str, str], *, whole: bool = False) -> dict[str, str]:
    """Return a table with the variables in its values replaced, once: secrets are not expanded again.

    The environment of this process is never read. `${NAME:-default}` is the default if the name is missing or empty.
    With `whole`, as in Harbor, only a value that consists of one variable is replaced, and an empty secret counts.
    Raises InvalidRequest with all missing names without a default.
    """
    if missing := sorted(names_in(table, whole=whole) - secrets.keys()):
        names = ", ".join(missing)
        raise InvalidRequest(f"a task uses variables that its batch has no secret for: {names}", field="secrets")
    if whole:
        return {name: _whole(value, secrets) for name, value in table.items()}
    return {name: _VARIABLE.sub(lambda match: _value(match, secrets), value) for name, value in table.items()}


def _matches(value: str, whole: bool) -> Iterable[re.Match[str]]:
    return filter(None, [_WHOLE.fullmatch(value)]) if whole else _VARIABLE.finditer(value)


def _whole(value: str, secrets: Mapping[str, str]) -> str:
    match = _WHOLE.fullmatch(value)
    return secrets.get(match[1], match[3]) if match else value


def _value(match: re.Match[str], secrets: Mapping[str, str]) -> str:
    secret = secrets.get(match[1], "")
    return match[3] if match[3] is not None and not secret else secret

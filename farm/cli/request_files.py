"""Batches in files: problems as lines of JSON, a whole request as YAML or JSON, single settings as text.

Rule: file contents are taken literally or refused with their location (`FILE:LINE`), never reinterpreted: a duplicate
key in an object, another encoding, and a list in place of lines are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import InvalidRequest
from farm.extras import not_installed
from farm.rows.loaded_rows import WANTED, parsed, text_of

if TYPE_CHECKING:
    import yaml

_INDEX = re.compile(r"\binstances\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class InstanceFile:
    """The instances of a file, unchanged, and the line of each."""

    file: str
    instances: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def placed(self, text: str) -> str:
        """Return an error message with `FILE:LINE` in place of `instances[3]`."""

        def location(match: re.Match[str]) -> str:
            index = int(match[1])
            return f"{self.file}:{self.lines[index]}" if index < len(self.lines) else match[0]

        return _INDEX.sub(location, text)


def read_problems(path: Path) -> InstanceFile:
    """Read one instance per line, also from a .gz file. Raises InvalidRequest that names the line, OSError."""
    problems = InstanceFile(str(path))
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        value = parsed(line, location)
        if isinstance(value, list) and not problems.instances:
            raise InvalidRequest(f"this is a JSON array; expected: {WANTED}", field=location)
        if not isinstance(value, dict):
            raise InvalidRequest(f"this is not a JSON object; expected: {WANTED}", field=location)
        problems.instances.append(value)
        problems.lines.append(number)
    if not problems.instances:
        raise InvalidRequest(f"it is empty; expected: {WANTED}", field=str(path))
    return problems


def for_rows(form: str, settings: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Split `NAME=VALUE` texts into columns that the rows of a form accept, and settings of the batch."""
    from farm.rows.row_forms import FORMS

    settable = FORMS[form].settable if form in FORMS else ()
    columns = {name: value for name, _, value in (text.partition("=") for text in settings) if name in settable}
    return columns, tuple(text for text in settings if text.partition("=")[0] not in columns)


def read_rows_as(
    path: Path,
    form: str,
    mapping: Sequence[str],
    data_source: str,
    deduplicate: bool | None,
    given: Mapping[str, str] | None = None,
) -> tuple[InstanceFile, str]:
    """Read rows of a data set like `farm.rows.read_rows`; return them and a line with their number.

    `mapping` has texts `NAME=COLUMN`, `given` columns for all rows. Raises InvalidRequest that names the rows,
    NotInstalled, OSError.
    """
    from farm.rows import read_rows

    columns = {}
    for text in mapping:
        name, sign, column = text.partition("=")
        if not sign or not name or not column:
            raise InvalidRequest(f"{text!r} is not NAME=COLUMN, such as question=problem", field="--map")
        columns[name] = column
    rows = read_rows(path, form, columns=columns, data_source=data_source, deduplicate=deduplicate, given=given)
    instances = [each.model_dump(include={"data_source", "fields", "instance_id"}) for each in rows.instances]
    repeats = f", {rows.n_repeats} repeats left out" if rows.n_repeats else ""
    return InstanceFile(str(path), instances, rows.numbers), f"{rows.n_rows} rows{repeats}"


def read_request(path: Path) -> dict[str, Any]:
    """Read the fields of a BatchRequest from a YAML or JSON file. Raises InvalidRequest, OSError."""
    text = text_of(path)
    value = parsed(text, str(path)) if path.suffix == ".json" else _parsed_yaml(text, path)
    if not isinstance(value, dict):
        raise InvalidRequest("expected the fields of a batch request, such as `n_samples: 8`", field=str(path))
    return value


def set_fields(request: dict[str, Any], settings: tuple[str, ...]) -> None:
    """Set `name.inner=VALUE` texts in a request; VALUE is JSON, else a text. Raises InvalidRequest."""
    for setting in settings:
        path, sign, text = setting.partition("=")
        names = path.strip().split(".")
        if not sign or not all(names):
            raise InvalidRequest(f"{setting!r} is not NAME=VALUE, such as sampling.top_p=0.9", field="--set")
        if names[-1] == "engine_key":
            where = "--engine-key-file" if len(names) == 1 else "the request in a file"
            raise InvalidRequest(
                f"command lines are visible to every user: use {where}", field=f"--set {'.'.join(names)}"
            )
        if names[0] == "instances":
            raise InvalidRequest("instances come from FILE", field="--set")
        at = request
        for name in names[:-1]:
            inner = at.setdefault(name, {})
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{name} in {setting!r} has no fields of its own", field="--set")
            at = inner
        try:
            at[names[-1]] = json.loads(text)
        except ValueError:
            at[names[-1]] = text


def _parsed_yaml(text: str, path: Path) -> Any:
    # imported here: slow to load, and few write requests in YAML
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise not_installed(f"{path}: a request in YAML (JSON works, too)", str(error.name)) from error

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            pairs = [(self.construct_object(key, deep=True), value) for key, value in node.value]
            seen = set()
            for (key, _), (written, _) in zip(pairs, node.value, strict=True):
                if not isinstance(key, str) or key in seen:
                    problem = f"{key!r} occurs twice" if isinstance(key, str) else f"the name {key!r} is not text"
                    raise InvalidRequest(problem, field=f"{path}:{written.start_mark.line + 1}")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidRequest(f"not YAML: {error.problem}", field=f"{path}:{line}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"not YAML: {str(error).partition(chr(10))[0]}", field=str(path)) from error
